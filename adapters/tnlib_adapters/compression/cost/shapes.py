"""Sizes of a model and of the part of it that is compressed, from the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.sizes import count_compressed

Shape = tuple[int, int]


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model and of the part of it that is compressed.

    Parameters
    ----------
    n_parameters, n_bytes
        Numbers of all tensors, and their bytes on disk.
    n_before, bytes_before
        The same of the compressed weights and biases.
    width
        Width of the residual stream.
    n_heads
        Query heads of an attention layer.
    vocab
        Width of the logits; 0 for a model without predictions.
    blocks
        Numbers of the tensors of every block.
    projections
        Shapes (in, out) of the compressed projections of one attention layer, and the indices of these layers.
    layers
        Blocks whose projections are compressed.
    matrices
        For every block the shapes (in, out) of its other compressed matrices.
    tables
        Shapes (vocab, width) of the compressed embedding and unembedding.
    """

    n_parameters: int
    n_bytes: int
    n_before: int
    bytes_before: int
    width: int
    n_heads: int
    vocab: int
    blocks: tuple[int, ...]
    projections: dict[str, Shape]
    layers: tuple[int, ...]
    matrices: tuple[tuple[Shape, ...], ...]
    tables: tuple[Shape, ...]

    @property
    def outside(self) -> int:
        """Numbers of the tensors outside the blocks."""
        return self.n_parameters - sum(self.blocks)

    def of_block(self, k: int) -> list[Shape]:
        """Return the shapes of the compressed weights of a block."""
        return [*(self.projections.values() if k in self.layers else ()), *self.matrices[k]]

    def all_weights(self) -> Iterator[Shape]:
        """Yield the shapes of all compressed weights."""
        for k in range(len(self.blocks)):
            yield from self.of_block(k)
        yield from self.tables

    @property
    def largest(self) -> int:
        """Index of the block with the most compressed numbers, the first of several."""
        sizes = [sum(m * n for m, n in self.of_block(k)) for k in range(len(self.blocks))]
        return sizes.index(max(sizes))


def shapes_of(checkpoint: Checkpoint, request: Request) -> Shapes:
    """Return the sizes of a checkpoint and of the part that a request compresses."""
    wiring, tensors = checkpoint.wiring, checkpoint.folder.tensors
    with_text = request.calibrate is not None
    names = names_of(checkpoint, request.what, with_text=with_text)
    layers = wiring.projection_layers(request.what)
    attention = [linear for k in layers for linear in wiring.layers[k].attention.projections.values()]
    linears = [*attention, *(wiring.matrices[name] for name in names)]
    compressed = [tensors[name] for own in linears for name in (own.weight, own.bias) if name and name in tensors]
    sizes, d_model = wiring.sizes, wiring.sizes.d_model
    widths = {name: (width, d_model) if name == "o" else (d_model, width) for name, width in sizes.widths.items()}
    matrices = [
        tuple(
            _in_out(checkpoint, m.name)
            for m in (*layer.latent_matrices, *layer.feed_forward_matrices)
            if m.name in names
        )
        for layer in wiring.layers
    ]
    tables = [name for name in names if wiring.is_embedding(name) or wiring.is_unembedding(name)]
    return Shapes(
        n_parameters=sum(info.size for info in tensors.values()),
        n_bytes=sum(info.end - info.begin for info in tensors.values()),
        n_before=count_compressed(checkpoint, request.what, with_text=with_text),
        bytes_before=sum(info.end - info.begin for info in compressed),
        width=d_model,
        n_heads=sizes.n_heads,
        vocab=_vocab(wiring, checkpoint),
        blocks=tuple(
            sum(info.size for name, info in tensors.items() if name.startswith(f"{layer.module}."))
            for layer in wiring.layers
        ),
        projections=widths if layers else {},
        layers=tuple(layers),
        matrices=tuple(matrices),
        tables=tuple(_in_out(checkpoint, name) for name in tables),
    )


def _in_out(checkpoint: Checkpoint, name: str) -> Shape:
    """Return the shape (in, out) of a matrix; (vocab, width) of a table."""
    wiring = checkpoint.wiring
    matrix = wiring.matrices[name]
    m, n = checkpoint.folder.tensors[matrix.weight].shape[:2]
    if wiring.is_embedding(name) or wiring.is_unembedding(name):
        return max(m, n), min(m, n)
    return (n, m) if matrix.input_axis == 1 else (m, n)


def _vocab(wiring: Wiring, checkpoint: Checkpoint) -> int:
    if wiring.unembedding is None:
        return 0
    return max(checkpoint.folder.tensors[wiring.unembedding.linear.weight].shape)
