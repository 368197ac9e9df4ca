"""Numbers and bytes of a checkpoint by their role, and bytes of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.factorisation import Plan
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.write import replaced_names
from tnlib_adapters.files.safetensors_file import STORED_AS, TensorInfo, widest_float


def count_attention(checkpoint: Checkpoint) -> list[int]:
    """Return the parameters of every layer's attention, biases included, of a checkpoint that is not compressed.

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
    """Return the parameters in the weight and the bias of a matrix outside the attention."""
    matrix, tensors = checkpoint.wiring.matrices[name], checkpoint.folder.tensors
    bias = tensors.get(matrix.bias or "")
    return tensors[matrix.weight].size + (0 if bias is None else bias.size)


def count_compressed(checkpoint: Checkpoint, what: str, *, with_text: bool) -> int:
    """Return the parameters in the weights and biases of the part that `what` selects."""
    layers, names = checkpoint.wiring.projection_layers(what), names_of(checkpoint, what, with_text=with_text)
    attention = sum(info.size for k in layers for info in attention_tensors(checkpoint, k))
    return attention + sum(count_matrix(checkpoint, name) for name in names)


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
    """Return the bytes of the tensors of the compressed part in the factored layout; row indices are in config.json.

    The tensors of a module are written in the widest dtype of those that they replace; others are copied.
    """
    wiring, tensors, total = checkpoint.wiring, checkpoint.folder.tensors, 0
    layers = {module: layer for layer, module in enumerate(wiring.attention_modules)}
    for module, described in plan.descriptions.items():
        if module in layers:
            before = {info.name for info in attention_tensors(checkpoint, layers[module])}
        else:
            before = {wiring.matrices[module].weight, wiring.matrices[module].bias or ""} & tensors.keys()
        replaced = replaced_names(checkpoint, module, described)
        float_bits = float_width(tensors[name] for name in replaced)
        total += sum(description.n_bits(float_bits) for description in described) // 8
        total += sum(tensors[name].end - tensors[name].begin for name in before - {*replaced})
    return total


def float_width(replaced: Iterable[TensorInfo]) -> int:
    """Return the bits of a float in the tensors that replace these ones."""
    return 8 * STORED_AS[widest_float(replaced)].itemsize
