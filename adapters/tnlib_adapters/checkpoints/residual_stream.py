"""Tensors that write into or read from the residual stream of a checkpoint, and the norms in between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tnlib_adapters.architectures.wiring import Linear, NormWiring, Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint

# buffers in some checkpoints: masks and frequencies
_BUFFERS = re.compile(r"(\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|inv_freq|position_ids)$")


@dataclass(frozen=True)
class StreamAxis:
    """The axis of a tensor that is the residual stream."""

    tensor: str
    axis: int


@dataclass(frozen=True)
class Stream:
    """All tensors that touch the residual stream."""

    writers: tuple[StreamAxis, ...]  # weights and biases whose output is added to the stream
    readers: tuple[Linear, ...]  # affine maps whose input is the stream, or a norm of it
    norms: Mapping[NormWiring, tuple[Linear, ...]]  # norm -> the maps that read its output; () unless it is a pre-norm
    unknown: tuple[str, ...]  # tensors as wide as the stream whose role is unknown


def read_stream(checkpoint: Checkpoint) -> Stream:
    """Find the tensors that touch the residual stream; only headers are read."""
    wiring, tensors = checkpoint.wiring, checkpoint.folder.tensors
    readers, norms = [], dict.fromkeys([] if wiring.embedding.norm is None else [wiring.embedding.norm], ())
    for norm, maps in _reads(wiring):
        readers += maps
        if norm is not None:
            norms[norm] = (*norms.get(norm, ()), *(maps if norm.place == "pre" else ()))
    sublayers = [part for layer in wiring.layers for part in (layer.attention, layer.second) if part is not None]
    norms |= {part.output_norm: () for part in sublayers if part.output_norm is not None}
    writers = tuple(leg for leg in _writers(wiring) if leg.tensor in tensors)
    known = {leg.tensor for leg in writers} | {name for r in readers for name in (r.weight, r.bias)}
    known |= {name for norm in norms for name in (norm.weight, norm.bias)} | set(_beside_the_stream(wiring))
    unknown = [
        name
        for name, info in tensors.items()
        if name not in known and checkpoint.sizes.d_model in info.shape and not _BUFFERS.search(name)
    ]
    return Stream(writers, tuple(readers), norms, tuple(unknown))


def _reads(wiring: Wiring) -> Iterator[tuple[NormWiring | None, list[Linear]]]:
    """Yield the maps that read the stream, or those of an encoder and a decoder, with their norm."""
    for layer in wiring.layers:
        yield layer.attention.norm, list(layer.attention.inputs)
        if layer.second is not None:
            yield layer.second.norm, list(layer.second.inputs)
    if wiring.encoder is not None:
        yield wiring.encoder.final_norm, [matrix for layer in wiring.layers for matrix in layer.attention.memory_inputs]
    yield wiring.final_norm, [wiring.unembedding.reader] if wiring.unembedding else []


def _writers(wiring: Wiring) -> Iterator[StreamAxis]:
    embedding = wiring.embedding
    maps = [embedding.widen or embedding.table]
    for layer in wiring.layers:
        maps += [layer.attention.projections["o"], *(part.down for part in layer.feed_forward_layers)]
    for linear in maps:
        yield StreamAxis(linear.weight, linear.output_axis)
        yield from [StreamAxis(linear.bias, 0)] if linear.bias else []
    yield from (
        StreamAxis(name, -1) for name in (embedding.positions, embedding.segments, embedding.class_token) if name
    )


def _beside_the_stream(wiring: Wiring) -> Iterator[str]:
    """Yield tensors that may be as wide as the stream but do not touch it: those inside the attention, embeddings."""
    for layer in wiring.layers:
        yield from (norm.weight for norm in layer.attention.head_norms)
        if layer.attention.relative_bias is not None:
            yield layer.attention.relative_bias.table.weight
        if layer.attention.latent is not None:
            yield from (matrix.weight for matrix in layer.attention.latent.matrices)
            yield from (norm.weight for norm in layer.attention.latent.norms)
        if layer.experts is not None and layer.experts.correction:
            yield layer.experts.correction
    if wiring.embedding.widen:
        yield wiring.embedding.table.weight
        yield from [wiring.unembedding.linear.weight] if wiring.unembedding else []
