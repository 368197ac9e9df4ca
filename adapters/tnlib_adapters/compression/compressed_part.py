"""The part of a checkpoint that is compressed: its modules besides the attention, their roles, parameters and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Linear, Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.method_table import ATTENTION, EMBEDDING, FEED_FORWARD, UNEMBEDDING
from tnlib_adapters.files.safetensors_file import STORED_AS, TensorInfo, widest_float

_SCALE = 4  # bytes of the scale of a slice in plain int8


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


def compressed_weights(checkpoint: Checkpoint, what: str, *, with_text: bool) -> dict[str, TensorInfo | None]:
    """Return the biases of the weights that `what` selects, None where there is none, by tensor name of the weight."""
    linears = linears_of(checkpoint.wiring, what, names_of(checkpoint, what, with_text=with_text))
    return {linear.weight: checkpoint.folder.tensors.get(linear.bias or "") for linear in linears}


def linears_of(wiring: Wiring, what: str, modules: Sequence[str]) -> list[Linear]:
    """Return the linear layers of the projections that `what` selects, and those of modules outside the attention."""
    attentions = [wiring.layers[k].attention for k in wiring.projection_layers(what)]
    projections = [linear for attention in attentions for linear in attention.projections.values()]
    return [*projections, *(wiring.matrices[name] for name in modules)]


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
    biases = compressed_weights(checkpoint, what, with_text=with_text)
    tensors = checkpoint.folder.tensors
    return sum(tensors[weight].size + (0 if bias is None else bias.size) for weight, bias in biases.items())


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


def float_width(replaced: Iterable[TensorInfo]) -> int:
    """Return the bits of a float in the tensors that replace these ones."""
    return 8 * STORED_AS[widest_float(replaced)].itemsize


def plain_bytes(checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()) -> int:
    """Return the bytes of the compressed part in plain int8: one float32 scale per output, biases unchanged.

    The checkpoint is not compressed; `modules` are the compressed matrices outside the attention, see `names_of`.

    >>> from tnlib_adapters import builtin_path, open_checkpoint
    >>> plain_bytes(open_checkpoint(builtin_path()))  # in 2 layers 4 weights of 64 x 64, and as many scales and biases
    36864
    """
    tensors, linears = checkpoint.folder.tensors, linears_of(checkpoint.wiring, what, modules)
    biases = [bias for linear in linears if (bias := tensors.get(linear.bias or "")) is not None]
    rounded = ((tensors[linear.weight], linear.output_axis) for linear in linears)
    n_bytes = sum(weight.size + _SCALE * weight.shape[axis] for weight, axis in rounded)
    return n_bytes + sum(bias.end - bias.begin for bias in biases)
