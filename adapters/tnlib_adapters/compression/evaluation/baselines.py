"""Baselines of a comparison, their bytes and their models: plain int8, and GPTQ in 4 bits.

Plain int8 rounds to nearest with one scale per output; GPTQ (Frantar et al., ICLR 2023) has scales of groups of 128
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.selected_weights import fold_biases_of
from tnlib_adapters.compression.methods.compensated_rounding import round_by_gptq
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.integers import IntegerFormat, round_slices
from tnlib_adapters.files.tensor_file import TensorInfo

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.stored_weights import Change, Group

_SCALE = 4  # bytes of the scale of a slice
_GPTQ_BITS, _GPTQ_GROUP = 4, 128


def plain_bytes(checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()) -> int:
    """Return the bytes of the compressed part in plain int8: one float32 scale per output, biases unchanged.

    Parameters
    ----------
    checkpoint
        Not compressed.
    what
        "attention", "mlp" or "all".
    modules
        The compressed matrices outside the attention, see `names_of`.

    Examples
    --------
    >>> from tnlib_adapters import builtin_path, open_checkpoint
    >>> plain_bytes(open_checkpoint(builtin_path()))  # in 2 layers 4 weights of 64 x 64, and as many scales and biases
    36864
    """
    return sum(
        weight.size + _SCALE * weight.shape[linear.output_axis] + n_bias
        for linear, weight, n_bias in _weights(checkpoint, what, modules)
    )


def gptq_bytes(checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()) -> int:
    """Return the bytes of the compressed part rounded by GPTQ: 4 bits in groups of 128, biases unchanged.

    Parameters are those of `plain_bytes`. A zero point takes 4 bits.
    """
    table, total = checkpoint.wiring.embedding.table, 0
    for linear, weight, n_bias in _weights(checkpoint, what, modules):
        form = IntegerFormat(_GPTQ_BITS, 1 if linear == table else linear.input_axis, _GPTQ_GROUP)
        n_groups = math.prod(form.scale_shape(weight.shape))
        total += (form.n_bits(weight.shape) + _GPTQ_BITS * n_groups) // 8 + n_bias
    return total


def _weights(checkpoint: Checkpoint, what: str, modules: Sequence[str]) -> Iterator[tuple[Any, TensorInfo, int]]:
    """Yield the wiring, the weight as stored and the bytes of the bias of every matrix of the compressed part."""
    wiring, tensors = checkpoint.wiring, checkpoint.folder.tensors
    layers = wiring.projection_layers(what)
    matrices = [linear for k in layers for linear in wiring.layers[k].attention.projections.values()]
    for linear in (*matrices, *(wiring.matrices[name] for name in modules)):
        bias = tensors.get(linear.bias or "")
        yield linear, tensors[linear.weight], 0 if bias is None else bias.end - bias.begin


def round_weights(model: RunningModel, what: str = "attention", modules: Sequence[str] = ()) -> RunningModel:
    """Return a copy of a model with the compressed part rounded to plain int8.

    Parameters `what` and `modules` are those of `plain_bytes`.
    """

    def in_int8(_: str, weight: Array, output_axis: int) -> Array:
        q, scale = round_slices(weight, output_axis)
        return q * scale

    return model.changed(_rounding(model, what, modules, in_int8))


def gptq_model(
    source: SourceModel, moments: Mapping[str, Array], what: str = "attention", *, folded: bool = False
) -> RunningModel:
    """Return a copy of the source with the compressed part rounded to 4 bits by GPTQ.

    Parameters
    ----------
    source
        The original.
    moments
        Second moments of the inputs of all weights by their keys (see `instrument.weight_inputs`). A table is rounded
        as an unembedding if it also makes the predictions, otherwise to nearest.
    what
        "attention", "mlp" or "all".
    folded
        True if the moments belong to the model with biases folded by `fold_biases`, which changes no output.
    """
    model, wiring = source.original, source.original.wiring

    def by_gptq(key: str, weight: Array, output_axis: int) -> Array:
        is_table = wiring.is_embedding(key)
        axis = 1 if is_table else 1 - output_axis
        moments_of_input = moments[(wiring.tied_key or key) if is_table else key]
        reads = None
        if moments_of_input.ndim == 2:
            n_in = weight.shape[axis]
            reads = moments_of_input[:n_in, :n_in].astype(np.float64)  # without the row of the bias
        return round_by_gptq(weight, axis, _GPTQ_BITS, _GPTQ_GROUP, reads)

    rounding = _rounding(model, what, names_of(source.checkpoint, what, with_text=True), by_gptq)
    if not folded or not source.checkpoint.wiring.projection_layers(what):
        return model.changed(rounding)
    fold = fold_biases_of(model, keys=False)
    return model.changed(lambda group, values: rounding(group, fold(group, values)))


def _rounding(
    model: RunningModel, what: str, modules: Sequence[str], round_weight: Callable[[str, Array, int], Array]
) -> Change:
    """Return the change that rounds the compressed part, by a function of the input key, the weight and output axis."""
    import torch

    names = {id(parameter): name for name, parameter in model.model.named_parameters()}
    parts = {names[id(module.weight)]: (key, axis) for key, module, axis in _modules(model, what, modules)}

    def change(_: int, values: Group) -> Group:
        changed = dict(values)
        for name in values.keys() & parts.keys():
            key, output_axis = parts[name]
            changed[name] = torch.from_numpy(round_weight(key, changed[name].numpy(), output_axis))
        return changed

    return change


def _modules(model: RunningModel, what: str, modules: Sequence[str]) -> Iterator[tuple[str, Any, int]]:
    """Yield the key of the input, the module and the output axis of every weight of the compressed part."""
    from tnlib_adapters.instrument.running_model import find_matrix

    wiring = model.wiring
    for k in wiring.projection_layers(what):
        for held, linear in wiring.layers[k].attention.projections.items():
            key = f"{k}.{'y' if held == 'o' else 'x'}"
            yield key, model.layers[k].projections[held[0]].module, linear.output_axis
    for name in modules:
        yield name, find_matrix(model, name), wiring.matrix(name).output_axis
