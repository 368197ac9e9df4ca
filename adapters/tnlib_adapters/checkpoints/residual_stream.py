"""The residual stream of a checkpoint: which tensors write into it, which read from it, and the norms in between."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tnlib_adapters.architectures.architecture import by_config, names
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.factors.projections import module_names

# Tables that some checkpoints hold beside their weights: masks and frequencies.
_BUFFERS = re.compile(r"(\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|inv_freq|position_ids)$")


@dataclass(frozen=True)
class Leg:
    """The leg of a tensor that is the residual stream."""

    tensor: str
    leg: int


@dataclass(frozen=True)
class Reader:
    """An affine map that reads from the stream; `bias` is the name of its bias, None where it has none."""

    weight: Leg
    bias: str | None


@dataclass(frozen=True)
class StreamNorm:
    """A norm of the whole stream.

    `place` is "before" the maps that read from it; "after" a sum, so that its output is the stream; "behind" a map
    that writes, before the sum; or "output", where the model ends in it.
    """

    weight: str
    bias: str | None
    place: Literal["before", "after", "behind", "output"]
    readers: tuple[Reader, ...] = ()


@dataclass(frozen=True)
class Stream:
    """Everything that touches the residual stream; `unknown` names tensors as wide as it whose part is not known."""

    writers: tuple[Leg, ...]
    readers: tuple[Reader, ...]
    head: Reader | None  # the one among them that makes the logits
    norms: tuple[StreamNorm, ...]
    unknown: tuple[str, ...]


def read_stream(checkpoint: Checkpoint) -> Stream:
    """Find what touches the residual stream, by the row of the architecture; only headers are looked at."""
    norms = list(_norms(checkpoint))
    inner = [reader for _, reader, _ in _modules(checkpoint)]
    head = _head(checkpoint)
    readers = (*inner, *([head] if head else []))
    writers = tuple(_writers(checkpoint))
    told = {leg.tensor for leg in writers} | {r.weight.tensor for r in readers} | {r.bias for r in readers}
    told |= {norm.weight for norm in norms} | {norm.bias for norm in norms} | set(_inside(checkpoint))
    unknown = [
        name
        for name, info in checkpoint.folder.tensors.items()
        if name not in told and checkpoint.sizes.d_model in info.shape and not _BUFFERS.search(name)
    ]
    return Stream(writers, readers, head, tuple(norms), tuple(unknown))


def full_name(checkpoint: Checkpoint, name: str) -> str | None:
    """Return a name with the prefix of this checkpoint, None if there is no such tensor."""
    tensors = checkpoint.folder.tensors
    return next((full for full in (checkpoint.prefix + name, name) if full in tensors), None)


def unembedding(checkpoint: Checkpoint) -> str | None:
    """Return the module whose weight (vocab, width) makes the logits, None for a model that ends in hidden states."""
    row = checkpoint.architecture
    name = next((n for n in row.unembed if full_name(checkpoint, f"{n}.weight")), None)
    if name in row.embeddings and row.get(checkpoint.config, "tie_word_embeddings") is False:
        return None
    return name


def _head(checkpoint: Checkpoint) -> Reader | None:
    """Return what the logits read from the stream: the unembedding, or a map to its narrower space."""
    name, row = unembedding(checkpoint), checkpoint.architecture
    if name is None:
        return None
    if row.narrow and full_name(checkpoint, f"{row.narrow[1]}.weight"):
        name = row.narrow[1]
    weight = full_name(checkpoint, f"{name}.weight")
    return Reader(Leg(str(weight), 1), full_name(checkpoint, f"{name}.bias"))


def _modules(checkpoint: Checkpoint) -> Iterator[tuple[str, Reader, str]]:
    """Yield (kind, reader, norm that may stand before it) of every map in the layers that reads from the stream."""
    row = checkpoint.architecture
    leg = 1 if row.stored == "out_in" else 0
    for layer in range(checkpoint.n_layers):
        attention = _first(checkpoint, row.attention_norm, layer)
        for module, held in module_names(row, checkpoint.prefix, layer).items():
            if held != "o":
                bias = f"{module}.bias" if f"{module}.bias" in checkpoint.folder.tensors else None
                yield "attention", Reader(Leg(f"{module}.weight", leg), bias), attention
        if row.mlp is not None:
            norm = _first(checkpoint, row.mlp.norm, layer)
            for module in dict.fromkeys(m.format(layer=layer) for m in (row.mlp.gate, row.mlp.up) if m):
                weight = str(full_name(checkpoint, f"{module}.weight"))
                yield "mlp", Reader(Leg(weight, leg), full_name(checkpoint, f"{module}.bias")), norm


def _writers(checkpoint: Checkpoint) -> Iterator[Leg]:
    row = checkpoint.architecture
    leg = 0 if row.stored == "out_in" else 1
    for layer in range(checkpoint.n_layers):
        modules = [m for m, held in module_names(row, "", layer).items() if held == "o"]
        modules += [row.mlp.down.format(layer=layer)] if row.mlp else []
        for module in modules:
            yield from _leg(checkpoint, f"{module}.weight", leg)
            yield from _leg(checkpoint, f"{module}.bias", 0)
    if row.reads == "images":
        base = row.embeddings[0]
        parent = base.split(".")[0]
        yield from _leg(checkpoint, f"{base}.weight", 0)  # d_model channels p p
        yield from _leg(checkpoint, f"{base}.bias", 0)
        yield from _leg(checkpoint, f"{parent}.cls_token", 2)
        yield from _leg(checkpoint, f"{parent}.position_embeddings", 2)
        return
    tables = list(row.embeddings)
    if row.narrow and full_name(checkpoint, f"{row.narrow[0]}.weight"):
        yield from _leg(checkpoint, f"{row.narrow[0]}.weight", 0)  # d_model e
        tables = tables[1:]
    for table in tables:
        yield from _leg(checkpoint, f"{table}.weight", 1)


def _norms(checkpoint: Checkpoint) -> Iterator[StreamNorm]:
    row = checkpoint.architecture
    place = by_config(row.norm_place, checkpoint.config)
    modules = list(_modules(checkpoint))
    if place is not None:
        for name in dict.fromkeys(norm for _, _, norm in modules):
            of_norm = tuple(reader for _, reader, norm in modules if norm == name)
            yield _norm(checkpoint, name, "before", of_norm) if place == "before" else _norm(checkpoint, name, "after")
    if row.embedding_norm:
        yield _norm(checkpoint, row.embedding_norm, "after")
    for layer in range(checkpoint.n_layers):
        for behind in (row.attention_norm_after, row.mlp.norm_after if row.mlp else None):
            if behind:
                yield _norm(checkpoint, behind.format(layer=layer), "behind")
    final = by_config(row.final_norm, checkpoint.config)
    if final:
        head = _head(checkpoint)
        yield _norm(checkpoint, final, "before" if head else "output", (head,) if head else ())


def _norm(
    checkpoint: Checkpoint,
    name: str,
    place: Literal["before", "after", "behind", "output"],
    readers: tuple[Reader, ...] = (),
) -> StreamNorm:
    weight, bias = (
        next((n for n in (full_name(checkpoint, f"{name}.{part}") for part in parts) if n), None)
        for parts in (("weight", "gamma"), ("bias", "beta"))
    )
    return StreamNorm(str(weight), bias, place, readers)


def _inside(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield tensors that may be as wide as the stream and do not touch it: the tables of narrower embeddings."""
    row = checkpoint.architecture
    if row.narrow and full_name(checkpoint, f"{row.narrow[0]}.weight"):
        yield from (n for t in (row.embeddings[0], *row.unembed) if (n := full_name(checkpoint, f"{t}.weight")))
    for layer in range(checkpoint.n_layers):
        base = row.attention.format(layer=layer)
        yield from (n for norm in row.qk_norm or () if (n := full_name(checkpoint, f"{base}.{norm}.weight")))


def _leg(checkpoint: Checkpoint, name: str, leg: int) -> Iterator[Leg]:
    full = full_name(checkpoint, name)
    if full is not None:
        yield Leg(full, leg)


def _first(checkpoint: Checkpoint, name: str | tuple[str, ...] | None, layer: int) -> str:
    """Return the first of these norms that the checkpoint has."""
    found = [n.format(layer=layer) for n in names(name)]
    return next((n for n in found if full_name(checkpoint, f"{n}.weight")), found[-1] if found else "")
