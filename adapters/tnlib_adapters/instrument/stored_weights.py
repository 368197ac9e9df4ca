"""Weights of a transformers model in memory, or on a device, only while they are needed.

A group of weights is one block, or all weights outside the blocks. A group is read from the checkpoint when it is
loaded, factored weights multiplied out, and converted to float32. The weights of a small model stay in memory; of a
larger one those of the blocks that ran last do.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.factors.model_weights import OUTSIDE
from tnlib_adapters.factors.projections import put_together
from tnlib_adapters.files.process_memory import WEIGHTS as IN_MEMORY

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_POOLER = "pooler."  # a layer after the embeddings that many checkpoints lack and nothing here uses
_ROTARY = r"rotary_emb\.inv_freq"  # stored by older versions of transformers
Group = dict[str, Tensor]  # name of a parameter or buffer in the model -> its values
Change = Callable[[int, Group], Group]  # index and weights of a group -> changed weights


@dataclass(frozen=True)
class Placement:
    """Device and dtype of the weights of a running model."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    dtype: torch.dtype = torch.float32

    def place(self, value: Tensor) -> Tensor:
        """Return a weight or buffer on the device; floats in the dtype."""
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)


def placement_of(function: str, device: str, dtype: str) -> Placement:
    """Return the placement of these names, such as "cuda:0" and "bfloat16"; `ArgumentError` for another."""
    if dtype not in DTYPES:
        names = ", ".join(map(repr, DTYPES))
        raise ArgumentError(f"{function}: dtype must be one of {names}, got {dtype!r}.")
    try:
        torch_device = torch.device(device)
        torch.zeros(1, device=torch_device).cpu()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(
            f"{function}: device must be one that torch computes on here, such as 'cpu', got {device!r} "
            f"({str(error).splitlines()[0]}); name another, or leave it out."
        ) from error
    return Placement(torch_device, DTYPES[dtype])


@dataclass(frozen=True)
class Source:
    """Stored tensors of the parameters and persistent buffers of a model."""

    checkpoint: Checkpoint  # folder of the weights
    wiring: Wiring  # wiring of the model, by the names in memory
    # Name in the model -> stored tensor. A list holds one entry for every expert; a tuple holds matrices that are
    # joined along their first axis.
    stored: Mapping[str, Any]

    def read(self, names: Sequence[str]) -> Group:
        """Return the values of some parameters and buffers, floats in single precision."""
        factored = self._factored
        values = {name: self._read(self.stored[name]) for name in names if name not in factored}
        for k in {factored[name] for name in names if name in factored}:
            joined = put_together(self.wiring.layers[k].attention, self.checkpoint.projections(k))
            values |= {name: joined[name] for name in names if factored.get(name) == k}
        return {name: _as_tensor(array) for name, array in values.items()}

    @cached_property
    def _factored(self) -> dict[str, int]:
        return _layers_of_factors(self.checkpoint, self.wiring)

    def _read(self, stored: Any) -> Array:
        if isinstance(stored, str):
            return self.checkpoint.folder.tensors[stored].read_finite()
        parts = [self._read(part) for part in stored]
        return np.stack(parts) if isinstance(stored, list) else np.concatenate(parts)


def _layers_of_factors(checkpoint: Checkpoint, wiring: Wiring) -> dict[str, int]:
    """Return the layers of the attention weights and biases that are stored as factors, by their names in a wiring."""
    described = {entry.module for entry in checkpoint.factored or () if entry.of}
    return {
        name: k
        for k, (module, layer) in enumerate(zip(checkpoint.wiring.attention_modules, wiring.layers, strict=True))
        if module in described
        for linear in layer.attention.projections.values()
        for name in (linear.weight, f"{linear.module}.bias")
    }


def find_stored(model: Any, checkpoint: Checkpoint, function: str) -> dict[str, Any]:
    """Return the stored tensor of every parameter and persistent buffer of a model, see `Source`, and tie parameters.

    `FileFormatError` if tensors are missing, left over or of another shape.
    """
    tensors, wiring = checkpoint.folder.tensors, checkpoint.wiring
    prefix, renamed = f"{model.base_model_prefix}.", _renamed(model, wiring)
    described = {entry.module for entry in checkpoint.factored or ()}
    of_factors = _layers_of_factors(checkpoint, wiring)
    stored, missing = dict[str, Any](), []
    for name in model.state_dict(keep_vars=True):
        names = [older for older in _older_names(name, prefix) if older in tensors or older in of_factors]
        source = renamed.get(name) or next(iter(names), None)
        if source is not None:
            stored[name] = source
        elif _POOLER in name:
            _set(model, name, nn.Parameter(torch.zeros(model.get_parameter(name).shape), requires_grad=False))
        else:
            missing.append(name)
    used = set(_flat(stored.values())) | {name for name in tensors if any(f"{m}." in name for m in described)}
    buffers = {older for name, _ in model.named_buffers() for older in _older_names(name, prefix)}
    ignored = re.compile("|".join([_ROTARY, *(model._keys_to_ignore_on_load_unexpected or ())]))
    left_over = [name for name in tensors.keys() - used - buffers if _is_of(model, name) and not ignored.search(name)]
    shapes = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
    mismatched = [
        name
        for name, source in stored.items()
        if isinstance(source, str) and source not in of_factors and tensors[source].shape != shapes[name]
    ]
    for problem, names in {"missing": missing, "left over": left_over, "of another shape": mismatched}.items():
        if names:
            first, n_others = sorted(names)[0], len(names) - 1
            others = f" and {n_others} more" if n_others else ""
            raise FileFormatError(
                f"{function}: every tensor of {type(model).__name__} must be in {checkpoint.folder.path} and no other "
                f"of its layers, got {first!r}{others} {problem}; download the checkpoint again."
            )
    _tie(model, stored)
    return stored


def _older_names(name: str, prefix: str) -> Iterator[str]:
    """Yield the names under which a tensor may be stored, with and without the prefix of the base model."""
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        yield candidate
        yield candidate.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _renamed(model: Any, wiring: Wiring) -> dict[str, Any]:
    """Return the stored tensors of embeddings, unembeddings and experts, which have other names in memory."""
    names = {id(module): name for name, module in model.named_modules()}
    renamed = dict[str, Any]()
    head = model.get_output_embeddings()
    if head is not None and wiring.unembedding is not None:
        renamed[f"{names[id(head)]}.weight"] = wiring.unembedding.linear.weight
    if wiring.embedding.shared:
        table = model.get_input_embeddings().weight
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and module.weight.shape == table.shape:
                renamed[f"{name}.weight"] = wiring.embedding.table.weight
    parameters = dict(model.named_parameters())
    for layer in wiring.layers:
        if layer.experts is None:
            continue
        spellings = _older_names(layer.module, f"{model.base_model_prefix}.")
        block = next(name for name in spellings if name in names.values())
        experts = layer.experts.experts
        tensors = {
            "gate.weight": layer.experts.router.weight,
            "experts.gate_up_proj": [tuple(matrix.weight for matrix in expert.inputs) for expert in experts],
            "experts.down_proj": [expert.down.weight for expert in experts],
        }
        of_layer = {f"{block}.mlp.{name}": stored for name, stored in tensors.items()}
        renamed |= {name: stored for name, stored in of_layer.items() if name in parameters}
    return renamed


def _flat(stored: Iterable[Any]) -> Iterator[str]:
    for source in stored:
        if isinstance(source, str):
            yield source
        else:
            yield from _flat(source)


def _tie(model: Any, stored: Mapping[str, Any]) -> None:
    """Give parameters of one stored tensor one object, as in a model that transformers loads."""
    first = dict[str, nn.Parameter]()
    for name in [name for name, _ in model.named_parameters(remove_duplicate=False)]:
        source = stored.get(name)
        if isinstance(source, str):
            _set(model, name, first.setdefault(source, model.get_parameter(name)))


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)


def _is_of(model: nn.Module, name: str) -> bool:
    """Test if a tensor belongs to a layer of this model, and not to a head that it was loaded without."""
    base: Any = getattr(model, "base_model", model)
    first: str = name.removeprefix(f"{base.base_model_prefix}.").split(".")[0]
    return any(first in dict(module.named_children()) for module in (base, model))


def _as_tensor(values: Array) -> Tensor:
    if values.dtype.kind == "f":
        values = values.astype(np.float32, copy=False)
    return torch.from_numpy(values if values.flags.writeable else np.array(values))


class StoredWeights:
    """Weights of the `blocks` of a model that are loaded group by group from a source.

    `change` is applied to every group that is loaded, and returns new tensors for changed weights. `original` are the
    weights of another model from the same source, to be changed: those in memory are not read again, and those that
    `change` returns unchanged are shared; without a change, those of a model that fits in memory are copied. At most
    `max_bytes` of weights, in float32, stay in memory. None for limit and placement is those of `original`, or
    `IN_MEMORY`, and float32 on the host.
    """

    def __init__(
        self,
        model: Any,
        blocks: Sequence[nn.Module],
        source: Source,
        *,
        change: Change | None = None,
        original: StoredWeights | None = None,
        max_bytes: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.placement: Placement = placement or (Placement() if original is None else original.placement)
        inherited = IN_MEMORY if original is None else original.max_bytes
        self.max_bytes: int = inherited if max_bytes is None else max_bytes
        self.source, self._change, self._model, self._original = source, change, model, original
        paths = {id(module): f"{name}." for name, module in model.named_modules()}
        of_blocks = [paths[id(block)] for block in blocks]
        self._names: dict[int, list[str]] = {group: [] for group in range(OUTSIDE, len(blocks))}
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in source.stored}
        self._empty = {**dict(model.named_parameters()), **buffers}
        names = defaultdict[int, list[str]](list)  # of one parameter, under which modules share it
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        self._same = {shared[0]: shared for shared in names.values()}
        for name in self._empty.keys() & source.stored.keys():
            group = next((k for k, path in enumerate(of_blocks) if name.startswith(path)), OUTSIDE)
            self._names[group].append(name)
        self.n_bytes = {group: sum(4 * self._empty[n].numel() for n in names) for group, names in self._names.items()}
        self._loaded, self._paused = dict[int, None](), False
        self._place_others()
        if self.fit_in_memory:
            for group in self._names:
                self.load(group)
            return
        shared = [alias for name in self._names[OUTSIDE] for alias in self._same.get(name, [name])]
        outside = {self._model.get_submodule(name.rpartition(".")[0]) for name in shared}
        for group, modules in {OUTSIDE: outside, **{k: {block} for k, block in enumerate(blocks)}}.items():
            for module in modules:
                # without a reference to these weights, so that the memory of a model is free when it is no longer used
                module.register_forward_pre_hook(partial(_load_before, weakref.ref(self), group), prepend=True)

    @property
    def fit_in_memory(self) -> bool:
        """True if all weights stay in memory."""
        return bool(sum(self.n_bytes.values()) <= self.max_bytes)

    def load(self, group: int) -> None:
        """Put the weights of a group in place.

        If all do not fit in memory, others are dropped for those of a block: first those outside the blocks, which are
        large and used only before and after all blocks.
        """
        if group in self._loaded:
            return
        loaded = [] if self.fit_in_memory or group == OUTSIDE else sorted(self._loaded, key=lambda k: k != OUTSIDE)
        while loaded and sum(self.n_bytes[k] for k in (*loaded, group)) > self.max_bytes // 2:
            self._drop(loaded.pop(0))
        self._put(self.read(group))
        self._loaded[group] = None

    def drop(self) -> None:
        """Free all weights, unless all stay in memory; they are read again when they are used."""
        for group in [] if self.fit_in_memory else list(self._loaded):
            self._drop(group)

    def _drop(self, group: int) -> None:
        self._put({name: self._empty[name] for name in self._names[group]})
        del self._loaded[group]

    def read(self, group: int) -> Group:
        """Return the weights of a group by their names in the model."""
        original = self._original
        if original is None:
            values = self.source.read(self._names[group])
        else:
            in_place = original._model.state_dict(keep_vars=True) if group in original._loaded else None
            values = original.read(group) if in_place is None else {n: in_place[n] for n in original._names[group]}
        if self._change is not None:  # what it returns unchanged is shared; numpy reads what it is given
            dtypes = {name: torch.float32 if v.is_floating_point() else v.dtype for name, v in values.items()}
            return self._change(group, {name: v.detach().to("cpu", dtypes[name]) for name, v in values.items()})
        if original is not None and original.fit_in_memory:
            return {name: value.detach().clone() for name, value in values.items()}
        return values

    @contextmanager
    def without(self, group: int, names: Iterable[str]) -> Iterator[None]:
        """Free these weights of a group inside, where nothing may read them, and read the group again at the end.

        The memory of those that another model shares is free when that one is. Contexts of one group do not nest: the
        inner one reads what the outer one freed.
        """
        self.load(group)
        self._put({name: self._empty[name] for name in names})
        try:
            yield
        finally:
            if group in self._loaded:
                self._drop(group)
            if self.fit_in_memory:
                self.load(group)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Load no block that is called inside."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _place_others(self) -> None:
        """Move what is not stored to the device: buffers made from the config, in their dtype, and unused layers."""
        for name, buffer in [(name, b) for name, b in self._model.named_buffers() if not b.is_meta]:
            _set(self._model, name, buffer.to(self.placement.device))
        for name, parameter in [(name, p) for name, p in self._model.named_parameters() if not p.is_meta]:
            _set(self._model, name, nn.Parameter(self.placement.place(parameter), requires_grad=False))

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            is_buffer = name not in self._same
            placed = value if value.is_meta else self.placement.place(value)
            parameter = (
                placed if is_buffer or isinstance(placed, nn.Parameter) else nn.Parameter(placed, requires_grad=False)
            )
            for alias in self._same.get(name, [name]):
                _set(self._model, alias, parameter)


def _load_before(weights: weakref.ref[StoredWeights], group: int, *_: Any) -> None:
    loaded = weights()
    if loaded is not None and (group == OUTSIDE or not loaded._paused):
        loaded.load(group)
