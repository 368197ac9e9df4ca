"""Baselines of a comparison, their bytes and their models: plain int8, and GPTQ in 4 bits.

Plain int8 rounds to nearest with one scale per output; GPTQ (Frantar et al., ICLR 2023) has scales of groups of 128
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.calibrated import fold_biases
from tnlib_adapters.compression.methods.compensated_rounding import round_by_gptq
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.integers import IntegerFormat, round_slices
from tnlib_adapters.factors.projections import Projections
from tnlib_adapters.files.tensor_file import TensorInfo

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel

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
    """Round the compressed part of a model in memory to plain int8, in place, and return the model.

    Parameters `what` and `modules` are those of `plain_bytes`.
    """
    for _, module, output_axis in _modules(model, what, modules):
        q, scale = round_slices(module.weight.detach().numpy(), output_axis)
        _set_weight(module, q * scale)
    return model


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
    checkpoint, model = source.checkpoint, source.copy()
    wiring, modules = model.wiring, names_of(checkpoint, what, with_text=True)
    for k in checkpoint.wiring.projection_layers(what) if folded else ():
        _fold_value_bias(model, k)
    for key, module, output_axis in _modules(model, what, modules):
        weight, is_table = module.weight.detach().numpy(), wiring.is_embedding(key)
        axis = 1 if is_table else 1 - output_axis
        moments_of_input = moments[(wiring.tied_key or key) if is_table else key]
        reads = None
        if moments_of_input.ndim == 2:
            n_in = weight.shape[axis]
            reads = moments_of_input[:n_in, :n_in].astype(np.float64)  # without the row of the bias
        _set_weight(module, round_by_gptq(weight, axis, _GPTQ_BITS, _GPTQ_GROUP, reads))
    return model


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


def _set_weight(module: Any, values: Array) -> None:
    import torch

    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(values))


def _fold_value_bias(model: RunningModel, k: int) -> None:
    """Move the value bias of a layer of a running model into its output bias; no weight is read from disk again."""
    import torch

    value, output = (model.layers[k].projections[name] for name in "vo")
    held = {"v": getattr(value.module, "bias", None), "o": getattr(output.module, "bias", None)}
    if held["v"] is None or held["o"] is None:
        return
    weight = model.wiring.layers[k].attention.projections["o"].on_rows(output.module.get_parameter("weight"))
    biases = {"v": value.written(held["v"]).detach().numpy(), "o": held["o"].detach().numpy()}
    folded = fold_biases(Projections({"o": weight.detach().numpy()}, biases), model.sizes, keys=False)
    with torch.no_grad():
        held["o"].copy_(torch.from_numpy(folded.biases["o"]))
        held["v"][value.columns.flatten()] = 0.0
