"""Numbers and bytes of a checkpoint by their role, as stored and with the weights rounded to int8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.factors.integers import round_slices
from tnlib_adapters.files.tensor_file import TensorInfo

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel

_SCALE = 4  # bytes of the scale of a slice


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


def plain_bytes(checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = (), bits: int = 8) -> int:
    """Return the bytes of the compressed part with its weights rounded: one scale per output, biases unchanged."""
    wiring, tensors = checkpoint.wiring, checkpoint.folder.tensors
    layers = wiring.projection_layers(what)
    matrices = [linear for k in layers for linear in wiring.layers[k].attention.projections.values()]
    count = 0
    for linear in (*matrices, *(wiring.matrices[name] for name in modules)):
        weight, bias = tensors[linear.weight], tensors.get(linear.bias or "")
        count += weight.size * bits // 8 + _SCALE * weight.shape[linear.output_axis]
        count += 0 if bias is None else bias.end - bias.begin
    return count


def round_weights(
    model: RunningModel, what: str = "attention", modules: Sequence[str] = (), bits: int = 8
) -> RunningModel:
    """Round the weights of the compressed part of a model in memory, one scale per output, and return the model."""
    import torch

    from tnlib_adapters.instrument.running_model import find_matrix

    wiring = model.wiring
    weights: list[tuple[Any, int]] = [
        (model.layers[k].projections[held[0]].module, linear.output_axis)
        for k in wiring.projection_layers(what)
        for held, linear in wiring.layers[k].attention.projections.items()
    ]
    weights += [(find_matrix(model, name), wiring.matrix(name).output_axis) for name in modules]
    for module, outputs in weights:
        q, scale = round_slices(module.weight.detach().numpy(), outputs, bits)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(q * scale))
    return model
