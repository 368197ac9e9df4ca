"""Matrices that are compressed besides projections of the attention: their names, roles and weights."""

from __future__ import annotations

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.method_table import ATTENTION, EMBEDDING, FEED_FORWARD, UNEMBEDDING


def names_of(checkpoint: Checkpoint, what: str, *, with_text: bool = False) -> list[str]:
    """Return the modules that `what` selects ("all", "linear", "attention", "mlp"), besides projections of attention.

    They include all matrices of attention on latent vectors. "all" includes the embedding and the unembedding, which
    may be one matrix, but for those of `left_dense`.
    """
    wiring, names = checkpoint.wiring, list[str]()
    for layer in wiring.layers:
        names += [matrix.name for matrix in layer.latent_matrices if what != "mlp"]
        names += [matrix.name for matrix in layer.feed_forward_matrices if what != "attention"]
    if what != "all" or wiring.reads != "tokens":
        return names
    left = left_dense(checkpoint, with_text=with_text)
    return [*names, *(name for name in _tables(wiring) if name not in left)]


def left_dense(checkpoint: Checkpoint, *, with_text: bool) -> dict[str, str]:
    """Return by module name why the embedding or the unembedding of a model of text stays as it is."""
    wiring, head = checkpoint.wiring, checkpoint.wiring.unembedding
    if head is not None:
        copied = head.tied and not head.shared
        reason = "config.json ties embedding and unembedding, but the file holds both"
        return dict.fromkeys(_tables(wiring), reason) if copied else {}
    masked = wiring.masked_head
    if masked and any(f"{masked}.decoder.weight" in name for name in checkpoint.folder.tensors):
        return {wiring.embedding.table.name: "the head that predicts masked tokens holds a matrix of the same size"}
    if masked and with_text:
        return {wiring.embedding.table.name: "it also predicts masked tokens, which calibration does not run"}
    return {}


def weight_of(checkpoint: Checkpoint, name: str) -> int:
    """Return how many times the relative error of a matrix outside the attention counts without gradients.

    The final stream of L layers is a sum of 2 L + 1 terms: what each sublayer adds, and the embedding. An error of one
    term reaches the logits with that share of the stream, an error of the unembedding with the whole stream.
    """
    wiring = checkpoint.wiring
    n_terms = 2 * checkpoint.n_layers + 1
    if wiring.is_unembedding(name):
        return n_terms
    tied = wiring.is_tied(name) or (wiring.is_embedding(name) and wiring.masked_head is not None)
    return n_terms + 1 if tied else 1


def _tables(wiring: Wiring) -> list[str]:
    return [name for name in wiring.matrices if wiring.is_embedding(name) or wiring.is_unembedding(name)]


def compressed_weights(checkpoint: Checkpoint, what: str, *, with_text: bool) -> set[str]:
    """Return the tensor names of the weights that `what` selects, without biases."""
    wiring = checkpoint.wiring
    layers = wiring.projection_layers(what)
    attention = {linear.weight for k in layers for linear in wiring.layers[k].attention.projections.values()}
    return attention | {wiring.matrices[name].weight for name in names_of(checkpoint, what, with_text=with_text)}


def widest_component(checkpoint: Checkpoint, what: str) -> int:
    """Return the most components of a weight of `what` that a text can calibrate, tables excluded.

    The moments at the smaller side of a weight must not be singular.
    """
    widths = checkpoint.sizes.widths
    sides = [min(checkpoint.sizes.d_model, max(widths.values()))] if checkpoint.wiring.projection_layers(what) else []
    for name in names_of(checkpoint, what, with_text=True):
        weight = checkpoint.locate(f"{name}.weight")
        if weight is not None and not checkpoint.wiring.is_embedding(name):
            sides.append(min(weight.shape))
    return max(sides)


def role_of(wiring: Wiring, name: str) -> str:
    """Return `ATTENTION`, `FEED_FORWARD`, `EMBEDDING` or `UNEMBEDDING`, the role of a module of `names_of`.

    An embedding that also makes the predictions is an embedding.
    """
    if any(name == matrix.name for layer in wiring.layers for matrix in layer.latent_matrices):
        return ATTENTION
    if wiring.is_embedding(name):
        return EMBEDDING
    return UNEMBEDDING if wiring.is_unembedding(name) else FEED_FORWARD


def read_weight(checkpoint: Checkpoint, name: str) -> tuple[Array, int]:
    """Return the weight of a module as (in, out), and the size of its bias."""
    bias = checkpoint.locate(f"{name}.bias")
    weight: Array = checkpoint.wiring.matrices[name].on_rows(checkpoint.read(f"{name}.weight"))
    return weight, 0 if bias is None else bias.size
