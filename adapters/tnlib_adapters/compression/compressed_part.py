"""The part of a checkpoint that is compressed: its weights, their parameters and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.method_table import EVERYWHERE
from tnlib_adapters.factors import ATTENTION, FEED_FORWARD, UNEMBEDDING
from tnlib_adapters.factors.model_weights import ModelWeight, biases_of, n_bytes, weights_of

_ROLES = {  # of the weights that `what` selects
    "all": EVERYWHERE,
    "linear": (ATTENTION, FEED_FORWARD),
    "attention": (ATTENTION,),
    "mlp": (FEED_FORWARD,),
}
_SCALE = 4  # bytes of the scale of a slice in plain int8


def compressed_weights(checkpoint: Checkpoint, what: str, *, with_text: bool = False) -> list[ModelWeight]:
    """Return the weights that `what` selects: "all", "linear", "attention" or "mlp", but for those of `left_dense`.

    >>> from tnlib_adapters import builtin_path, open_checkpoint
    >>> checkpoint = open_checkpoint(builtin_path())
    >>> [weight.key for weight in compressed_weights(checkpoint, "attention")]
    ['0.q', '0.k', '0.v', '0.o', '1.q', '1.k', '1.v', '1.o']
    """
    left = left_dense(checkpoint, with_text=with_text)
    weights = weights_of(checkpoint.wiring, checkpoint.folder.tensors)
    return [own for own in weights if own.role in _ROLES[what] and own.module not in left]


def left_dense(checkpoint: Checkpoint, *, with_text: bool) -> dict[str, str]:
    """Return by module name why the embedding or the unembedding of a model of text stays as it is."""
    wiring, head = checkpoint.wiring, checkpoint.wiring.unembedding
    if head is not None:
        copied = head.tied and not head.shared
        reason = "config.json ties embedding and unembedding, but the file holds both"
        return {wiring.embedding.table.name: reason, head.linear.name: reason} if copied else {}
    masked = wiring.masked_head
    if masked and any(f"{masked}.decoder.weight" in name for name in checkpoint.folder.tensors):
        return {wiring.embedding.table.name: "the head that predicts masked tokens holds a matrix of the same size"}
    if masked and with_text:
        return {wiring.embedding.table.name: "it also predicts masked tokens, which calibration does not run"}
    return {}


def error_weight(checkpoint: Checkpoint, weight: ModelWeight) -> int:
    """Return how many times the relative error of a weight counts without gradients.

    The final stream of L layers is a sum of 2 L + 1 terms: what each sublayer adds, and the embedding. An error of one
    term reaches the logits with that share of the stream, an error of the unembedding with the whole stream.
    """
    n_terms = 2 * checkpoint.n_layers + 1
    if weight.role == UNEMBEDDING:
        return n_terms
    is_tied = weight.is_table and (weight.tied_key is not None or checkpoint.wiring.masked_head is not None)
    return n_terms + 1 if is_tied else 1


def widest_component(weights: Iterable[ModelWeight]) -> int:
    """Return the most components of a weight that a text can calibrate, tables excluded.

    The moments at the smaller side of a weight must not be singular.
    """
    return max(min(own.shape) for own in weights if not own.is_table)


def stored_bytes(checkpoint: Checkpoint, weights: Sequence[ModelWeight]) -> tuple[dict[str, int], int]:
    """Return the bytes of "attention", of "matrices" and of "other", and the other numbers.

    "matrices" are those of `weights` that are no projections, an entry that exists only if there are any. Where there
    are no projections among `weights`, the numbers of attention count as other.
    """
    layers = [layer.attention for layer in checkpoint.wiring.layers]
    in_attention = [f"{linear.module}." for attention in layers for linear in attention.matrices]
    in_attention += [f"{attention.parent}.tnlib." for attention in layers]
    matrices = tuple(f"{own.linear.module}." for own in weights if not own.of)
    sums, n_other = {"attention": 0, "other": 0} | ({"matrices": 0} if matrices else {}), 0
    is_compressed = {"matrices": True, "attention": any(own.of for own in weights), "other": False}
    for name, info in checkpoint.folder.tensors.items():
        is_attention = name.startswith(tuple(in_attention))
        kind = "matrices" if name.startswith(matrices) else "attention" if is_attention else "other"
        sums[kind] += info.end - info.begin
        n_other += 0 if is_compressed[kind] else info.size
    return sums, n_other


def plain_bytes(weights: Sequence[ModelWeight]) -> int:
    """Return the bytes of the weights in plain int8: one float32 scale per output, biases unchanged.

    The checkpoint is not compressed.

    >>> from tnlib_adapters import builtin_path, open_checkpoint
    >>> # in 2 layers 4 weights of 64 x 64, and as many scales and biases
    >>> checkpoint = open_checkpoint(builtin_path())
    >>> plain_bytes(compressed_weights(checkpoint, "attention"))
    36864
    """
    rounded = sum(rows * columns + _SCALE * columns for rows, columns in (own.shape for own in weights))
    return rounded + n_bytes(biases_of(weights).values())
