"""Checks of arguments that are quimb networks, names of indices or tags, and conversion of their data to numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from textwrap import shorten
from typing import Any

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import wrong_type
from tnlib._typing import Array
from tnlib._validate import HALF, as_array, to_numpy


def as_network(function: str, tn: Any) -> qtn.TensorNetwork:
    """Return `tn`, a quimb TensorNetwork with at least one tensor."""
    if isinstance(tn, qtn.Tensor):
        raise ArgumentTypeError(f"{function}: tn must be a TensorNetwork of quimb, got a Tensor; pass tn.as_network().")
    if not isinstance(tn, qtn.TensorNetwork):
        advice = "convert a format with tnlib.interop.quimb.to_network"
        raise wrong_type(function, "tn", "a TensorNetwork of quimb", tn, advice)
    if tn.num_tensors == 0:
        raise ArgumentError(f"{function}: tn must hold at least one tensor, got none; add tensors first.")
    return tn


def as_index_names(function: str, parameter: str, names: Any) -> tuple[str, ...]:
    """Return distinct names of indices."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be names of indices, got {names!r}; pass a list such as ['k0', 'k1']."
        )
    if len(set(names)) != len(names):
        raise ArgumentError(
            f"{function}: {parameter} must name each index once, got {', '.join(names)}; remove repeated names."
        )
    return tuple(names)


def as_output_indices(function: str, tn: qtn.TensorNetwork, legs: Any) -> tuple[str, ...]:
    """Return names of indices of `tn`, by default its outer indices in its order."""
    if legs is None:
        return tuple(tn.outer_inds())
    names = as_index_names(function, "legs", legs)
    for name in names:
        if name not in tn.ind_map:
            raise ArgumentError(
                f"{function}: legs must name indices of the network, got {name!r} where there are "
                f"{shorten(', '.join(tn.ind_map), 100)}; choose among these."
            )
    return names


def as_tensor_id(function: str, tn: qtn.TensorNetwork, tensor: Any) -> int:
    """Return quimb's id of the only tensor that has all of these tags."""
    tags = (tensor,) if isinstance(tensor, str) else tensor
    if not isinstance(tags, Sequence) or not all(isinstance(tag, str) for tag in tags) or not tags:
        raise ArgumentTypeError(
            f"{function}: tensor must be a tag or several, got {tensor!r}; pass for example tensor='I0'."
        )
    ids = set(tn.tensor_map).intersection(*(tn.tag_map.get(tag, ()) for tag in tags))
    if len(ids) != 1:
        raise ArgumentError(
            f"{function}: tensor must be tags of exactly one tensor, got {' and '.join(tags)} of {len(ids)}; "
            f"the tags are {shorten(', '.join(tn.tag_map), 100)}."
        )
    return int(ids.pop())


def common_dtype(tensors: Iterable[qtn.Tensor]) -> np.dtype[Any]:
    """Return the common dtype of tensors that hold numpy or torch arrays; half precision counts as float32."""
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return np.result_type(*(np.float32 if name in HALF else np.dtype(name) for name in names))


def as_arrays(function: str, tn: qtn.TensorNetwork) -> list[Array]:
    """Return the data of all tensors, in the order of `tn`, as finite numpy arrays of native dtypes."""
    out = []
    for tensor in tn:
        name = f"the tensor {', '.join(tensor.tags) or 'without tags'}"
        data = to_numpy(function, name, tensor.data)
        out.append(as_array(function, name, data) if data.ndim else as_array(function, name, data[None])[0, ...])
    return out


def binary_exponent(tn: qtn.TensorNetwork) -> tuple[float, int]:
    """Return f and e with 10**tn.exponent = f * 2**e, 0.7 < f < 1.5; f is 1 for a power of two to roundoff."""
    twos = float(tn.exponent) * math.log2(10)
    e = round(twos)
    return (1.0 if abs(twos - e) <= 1e-15 * abs(twos) else 2.0 ** (twos - e)), e
