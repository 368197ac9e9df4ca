"""What the functions on networks share: quimb when it is needed, names that exist, one tensor out of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import HALF, as_numbers, refuse_infinite
from tnlib._validate import need as need_package


def need(function: str, module: str = "quimb.tensor") -> Any:
    """Import a module of quimb, or of what quimb brings along."""
    return need_package(function, module, "quimb")


def as_network(function: str, tn: Any) -> Any:
    """Return `tn`, a TensorNetwork of quimb with at least one tensor."""
    if not isinstance(tn, need(function).TensorNetwork):
        raise ArgumentTypeError(
            f"{function}: tn must be a TensorNetwork of quimb, got a {type(tn).__name__}; "
            "make one of a format with tnlib.network.to_network."
        )
    if tn.num_tensors == 0:
        raise ArgumentError(f"{function}: tn must hold at least one tensor, got none; there is nothing in it.")
    return tn


def as_names(function: str, parameter: str, names: Any) -> tuple[str, ...]:
    """Return distinct names of indices."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be names of indices, got {names!r}; pass a list such as ['k0', 'k1']."
        )
    if len(set(names)) != len(names):
        raise ArgumentError(
            f"{function}: {parameter} must name each index once, got {', '.join(names)}; rename what occurs twice."
        )
    return tuple(names)


def as_legs(function: str, tn: Any, legs: Any) -> tuple[str, ...]:
    """Return names of indices of `tn`; by default those that it leaves open, in its order."""
    if legs is None:
        return tuple(tn.outer_inds())
    names = as_names(function, "legs", legs)
    for name in names:
        if name not in tn.ind_map:
            raise ArgumentError(
                f"{function}: legs must name indices of the network, got {name!r} where there are {_list(tn.ind_map)}."
            )
    return names


def one_tensor(function: str, tn: Any, tensor: Any) -> int:
    """Return the number by which quimb knows the one tensor with all of these tags."""
    tags = (tensor,) if isinstance(tensor, str) else tensor
    if not isinstance(tags, Sequence) or not all(isinstance(tag, str) for tag in tags) or not tags:
        raise ArgumentTypeError(
            f"{function}: tensor must be a tag or several, got {tensor!r}; pass for example tensor='I0'."
        )
    found = set(tn.tensor_map)
    for tag in tags:
        found &= set(tn.tag_map.get(tag, ()))
    if len(found) != 1:
        raise ArgumentError(
            f"{function}: tensor must be tags of exactly one tensor, got {' and '.join(tags)} of {len(found)}; "
            f"there are {_list(tn.tag_map)}."
        )
    return int(found.pop())


def dtype_of(*tensors: Any) -> np.dtype[Any]:
    """Return the dtype that the tensors' data have in common, of numpy or torch; float32 stands for half precision."""
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return np.result_type(*(np.float32 if name in HALF else np.dtype(name) for name in names))


def arrays_of(function: str, tensors: Sequence[Any]) -> list[Array]:
    """Return the tensors' data as finite arrays of native dtypes; one without legs is an array without."""
    return [_as_data(function, tensor) for tensor in tensors]


def _as_data(function: str, tensor: Any) -> Array:
    name = f"the tensor {', '.join(tensor.tags) or 'without tags'}"
    data = tensor.data
    if hasattr(data, "detach"):  # of torch, on any device
        data = data.detach().cpu()
        data = data.float() if str(data.dtype) == "torch.bfloat16" else data
    scalar = np.ndim(data) == 0
    a = as_numbers(function, name, np.asarray(data)[None] if scalar else data)
    refuse_infinite(function, name, a)
    return a[0, ...] if scalar else a


def _list(names: Any) -> str:
    """List names, and both ends of many."""
    every = list(names)
    return ", ".join(every if len(every) <= 12 else [*every[:8], "...", *every[-3:]])
