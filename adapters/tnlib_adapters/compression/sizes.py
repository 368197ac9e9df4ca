"""Numbers and bytes of a checkpoint by their role, as stored and with the weights rounded by the baselines.

The baselines are plain int8, to nearest with one scale per output, and GPTQ in 4 bits (Frantar et al., ICLR 2023) with
scales of groups of 128 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.compensated_rounding import round_by_gptq as gptq
from tnlib_adapters.compression.methods.factorisation import Plan
from tnlib_adapters.compression.write import replaced_names
from tnlib_adapters.factors.integers import IntegerFormat, round_slices
from tnlib_adapters.files.tensor_file import STORED_AS, TensorInfo, widest_float

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel

_SCALE = 4  # bytes of the scale of a slice
_GPTQ_BITS, _GPTQ_GROUP = 4, 128


def count_attention(checkpoint: Checkpoint) -> list[int]:
    """Return the numbers in the weights and biases of every layer's attention, of a checkpoint that is not compressed.

    >>> from tnlib_adapters import builtin_path, open_checkpoint
    >>> count_attention(open_checkpoint(builtin_path()))  # 4 weights of 64 x 64, and 4 biases
    [16640, 16640]
    """
    return [sum(info.size for info in attention_tensors(checkpoint, layer)) for layer in range(checkpoint.n_layers)]


def attention_tensors(checkpoint: Checkpoint, layer: int) -> list[TensorInfo]:
    """Return the weights and biases of one layer's attention."""
    matrices = checkpoint.wiring.layers[layer].attention.matrices
    stored = (name for linear in matrices for name in (linear.weight, linear.bias) if name)
    return [checkpoint.folder.tensors[name] for name in stored if name in checkpoint.folder.tensors]


def count_matrix(checkpoint: Checkpoint, name: str) -> int:
    """Return the numbers in the weight and the bias of a matrix outside the attention."""
    matrix, tensors = checkpoint.wiring.matrices[name], checkpoint.folder.tensors
    bias = tensors.get(matrix.bias or "")
    return tensors[matrix.weight].size + (0 if bias is None else bias.size)


def stored_bytes(
    checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()
) -> tuple[dict[str, int], int]:
    """Return the bytes of "attention", of "matrices" (the weights of `modules`) and of "other", and the other numbers.

    The entry "matrices" exists only if there are modules. With `what` "mlp", the numbers of attention count as other.
    """
    attentions = [layer.attention for layer in checkpoint.wiring.layers]
    bases = tuple(
        f"{module}."
        for attention in attentions
        for module in (*(linear.module for linear in attention.matrices), f"{attention.parent}.tnlib")
    )
    other_modules = tuple(f"{checkpoint.wiring.matrices[name].module}." for name in modules)
    sums, n_other = {"attention": 0, "other": 0} | ({"matrices": 0} if modules else {}), 0
    for name, info in checkpoint.folder.tensors.items():
        kind = "matrices" if name.startswith(other_modules) else "attention" if name.startswith(bases) else "other"
        sums[kind] += info.end - info.begin
        n_other += info.size if kind == "other" or (kind == "attention" and what == "mlp") else 0
    return sums, n_other


def plan_bytes(checkpoint: Checkpoint, plan: Plan) -> int:
    """Return the bytes of the compressed part in the factored layout, row indices included.

    The tensors of a module are written in the widest dtype of those that they replace; others are copied.
    """
    wiring, tensors, total = checkpoint.wiring, checkpoint.folder.tensors, 0
    layers = {module: layer for layer, module in enumerate(wiring.attention_modules)}
    for module, own in plan.matrices.items():
        if module in layers:
            before = {info.name for info in attention_tensors(checkpoint, layers[module])}
        else:
            before = {wiring.matrices[module].weight, wiring.matrices[module].bias or ""} & tensors.keys()
        replaced = replaced_names(checkpoint, module, own)
        float_bits = float_width(tensors[name] for name in replaced)
        total += sum(matrix.n_bits(float_bits) for matrix in own) // 8
        total += sum(tensors[name].end - tensors[name].begin for name in before - {*replaced})
    return total


def float_width(replaced: Iterable[TensorInfo]) -> int:
    """Return the bits of a float in the tensors that replace these ones."""
    return 8 * STORED_AS[widest_float(replaced)].itemsize


def plain_bytes(checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()) -> int:
    """Return the bytes of the compressed part in plain int8: one scale per output, biases unchanged."""
    return sum(
        weight.size + _SCALE * weight.shape[linear.output_axis] + n_bias
        for linear, weight, n_bias in _weights(checkpoint, what, modules)
    )


def gptq_bytes(checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()) -> int:
    """Return the bytes of the compressed part rounded by GPTQ: 4 bits in groups of 128, biases unchanged.

    A zero point takes 4 bits.
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
    """Round the compressed part of a model in memory to plain int8, and return the model."""
    for _, module, output_axis in _modules(model, what, modules):
        q, scale = round_slices(module.weight.detach().numpy(), output_axis)
        _set_weight(module, q * scale)
    return model


def round_by_gptq(
    model: RunningModel, moments: Mapping[str, Array], what: str = "attention", modules: Sequence[str] = ()
) -> RunningModel:
    """Round the compressed part of a model in memory to 4 bits by GPTQ, and return the model.

    Parameters
    ----------
    model
        Its weights are replaced.
    moments
        Second moments of the inputs of these weights by their keys (see `instrument.weight_inputs`). A table is rounded
        as an unembedding if it also makes the predictions, otherwise to nearest.
    what, modules
        As in `stored_bytes`.
    """
    for key, module, output_axis in _modules(model, what, modules):
        weight, is_table = module.weight.detach().numpy(), model.wiring.is_embedding(key)
        axis = 1 if is_table else 1 - output_axis
        moments_of_input = moments[(model.wiring.tied_key or key) if is_table else key]
        reads = None
        if moments_of_input.ndim == 2:
            n_in = weight.shape[axis]
            reads = moments_of_input[:n_in, :n_in].astype(np.float64)  # without the row of the bias
        _set_weight(module, gptq(weight, axis, _GPTQ_BITS, _GPTQ_GROUP, reads))
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
