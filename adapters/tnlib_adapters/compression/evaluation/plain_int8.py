"""Plain int8, the baseline of the report: all weights rounded to nearest with one scale per output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.factors.integers import round_slices
from tnlib_adapters.files.safetensors_file import TensorInfo

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.stored_weights import Group

_SCALE = 4  # bytes of the scale of a slice


def plain_bytes(checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()) -> int:
    """Return the bytes of the compressed part in plain int8: one float32 scale per output, biases unchanged.

    Parameters
    ----------
    checkpoint
        Not compressed.
    what
        "all", "linear", "attention" or "mlp".
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
    import torch

    names = {id(parameter): name for name, parameter in model.model.named_parameters()}
    output_axes = {names[id(module.weight)]: axis for module, axis in _modules(model, what, modules)}

    def in_int8(_: int, values: Group) -> Group:
        changed = dict(values)
        for name in values.keys() & output_axes.keys():
            codes, scales = round_slices(changed[name].numpy(), output_axes[name])
            changed[name] = torch.from_numpy(codes * scales)
        return changed

    return model.changed(in_int8)


def _modules(model: RunningModel, what: str, modules: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Yield the module and the output axis of every weight of the compressed part."""
    from tnlib_adapters.instrument.running_model import find_matrix

    wiring = model.wiring
    for k in wiring.projection_layers(what):
        for letters, linear in wiring.layers[k].attention.projections.items():
            yield model.layers[k].projections[letters[0]].module, linear.output_axis
    for name in modules:
        yield find_matrix(model, name), wiring.matrix(name).output_axis
