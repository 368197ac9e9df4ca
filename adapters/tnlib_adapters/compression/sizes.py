"""Numbers and bytes of a checkpoint, by what they belong to: read from the heads of its files alone."""

from __future__ import annotations

from collections.abc import Sequence

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.factors.projections import module_names
from tnlib_adapters.files.tensor_file import TensorInfo


def count_attention(checkpoint: Checkpoint) -> list[int]:
    """Return the numbers in the weights and biases of every layer's attention, of a checkpoint that is not compressed.

    >>> from tnlib_adapters import builtin_path, open_checkpoint
    >>> count_attention(open_checkpoint(builtin_path()))  # 4 weights of 64 x 64, and 4 biases
    [16640, 16640]
    """
    return [sum(info.size for info in attention_tensors(checkpoint, layer)) for layer in range(checkpoint.n_layers)]


def attention_tensors(checkpoint: Checkpoint, layer: int) -> list[TensorInfo]:
    """Return the weights and biases of one layer's attention."""
    modules = module_names(checkpoint.architecture, checkpoint.prefix, layer)
    stored = [checkpoint.folder.tensors.get(f"{module}.{kind}") for module in modules for kind in ("weight", "bias")]
    return [info for info in stored if info is not None]


def stored_bytes(
    checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()
) -> tuple[dict[str, int], int]:
    """Return the bytes of the attention's tensors, of those of these modules and of all others, and numbers in others.

    Bytes of modules are there only where there are such; of `what` "mlp", attention is one of the others.
    """
    row = checkpoint.architecture
    bases = tuple(
        f"{checkpoint.prefix}{row.attention.format(layer=layer)}.{module}"
        for layer in range(checkpoint.n_layers)
        for module in (*(f"{name}." for name in row.projections), "tnlib.")
    )
    elsewhere = tuple(f"{checkpoint.prefix}{name}." for name in modules)
    sums, n_other = {"attention": 0, "other": 0} | ({"matrices": 0} if modules else {}), 0
    for name, info in checkpoint.folder.tensors.items():
        kind = "matrices" if name.startswith(elsewhere) else "attention" if name.startswith(bases) else "other"
        sums[kind] += info.end - info.begin
        n_other += info.size if kind == "other" or (kind == "attention" and what == "mlp") else 0
    return sums, n_other
