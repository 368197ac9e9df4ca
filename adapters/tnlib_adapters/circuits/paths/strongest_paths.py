r"""The strongest paths to a logit through up to three heads, of a frozen model of any architecture.

A path goes from the embedding through heads h_1, ..., h_m of ascending layers to the logit. Between heads it takes the
residual stream, norms and feed-forward layers: a linear map B at every position. With r the readout and x the embedding

    value of a path  =  <r, B K_(h_m) B ... K_(h_1) B x>.

All paths through at most three heads are compared, and none is left out: below every head h stand the streams that at
most one head has written, above it the readouts that at most one head reads, and a matrix product of both in the values
of h has the paths with h in the middle. With H heads and n positions this takes H passes down, H passes up, and H
products of (H, n d_head) with its like, for about H^3 / 6 paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib_adapters.circuits.paths.logit_paths import LogitContributions
from tnlib_adapters.circuits.paths.path_orders import PathOrders, path_orders
from tnlib_adapters.frozen.frozen_heads import FrozenHeads
from tnlib_adapters.frozen.frozen_model import FrozenBlock
from tnlib_adapters.result_table import Columns, Table

MOST_BYTES = 2 << 30  # of the streams below all heads, which are held at once
_SHOWN = 12
_DRAWN = 64  # paths of the picture in a notebook


@dataclass(frozen=True, eq=False, repr=False)
class StrongestPaths(Table):
    """Paths to a logit, the strongest first, returned by `strongest_paths`.

    Parameters
    ----------
    paths
        Heads of every path, first layer first, such as ("16.0", "17.3"); () for the path without heads.
    values
        (k,), contribution of every path.
    n_compared
        Number of all paths through at most three heads.
    orders
        Parts of the logit by number of heads, those of longer paths among them.
    """

    paths: tuple[tuple[str, ...], ...]
    values: Array
    n_compared: int
    orders: PathOrders

    @property
    def longer(self) -> float:
        """The sum of all paths through more than three heads."""
        return float(self.orders.embedding[4:].sum())

    @property
    def _title(self) -> str:
        return f"StrongestPaths, {len(self.paths)} of {self.n_compared:,} through at most three heads"

    def _columns(self, rows: Any) -> Columns:
        names = np.array([" > ".join((*path, "logit")) for path in self.paths], dtype=object)
        return {"path": names[rows], "value": self.values[rows]}

    def _printed(self) -> slice:
        return slice(0, _SHOWN)

    def _notes(self) -> list[str]:
        return [
            f"they sum to {self.values.sum():.3f} of {self.orders.total:.3f}; all longer paths sum to {self.longer:.3f}"
        ]

    def _picture(self) -> str:
        return heat_image(self.values[None, :_DRAWN], "values of the paths, strongest first", width=320)


def strongest_paths(contributions: LogitContributions, k: int = 100) -> StrongestPaths:
    """Return the k strongest paths from the embedding to a logit, of all through at most three heads.

    Parameters
    ----------
    contributions
        What `logit_contributions` returned, of a token or of any direction such as a difference of logits.
    k
        Number of paths.

    Raises
    ------
    ArgumentError
        If the streams below all heads do not fit into 2 GiB; freeze a shorter text.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.circuits import logit_contributions
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = strongest_paths(logit_contributions(tnlib_adapters.freeze(llama, [5, 6, 7, 8]), 9), 2465)
    >>> found.n_compared, bool(np.isclose(found.values.sum(), found.orders.embedding[:4].sum()))
    (2465, True)
    """
    k = as_count("strongest_paths", "k", k)
    model = contributions.model
    layers = [_Layer.of(block) for block in model.blocks]
    _check_memory(layers, model.embedding)
    below = list(_streams(layers, model.embedding))
    readouts = np.zeros((1, *model.embedding.shape), contributions.vector.dtype)
    readouts[0, contributions.position] = contributions.vector
    if model.final_norm is not None:
        readouts = model.final_norm.adjoint(readouts)
    above: list[str] = [""]  # the head that reads a readout
    names = [name for layer in layers for name in layer.names]
    candidates: list[tuple[tuple[str, ...], float]] = []
    n_compared = 1
    for layer, streams in zip(reversed(layers), reversed(below), strict=True):
        n_below = len(streams) - 1
        readouts = layer.through_after(readouts)
        new = list[Array]()
        for values, weights, heads in layer.products(readouts, streams):
            for products, read, name in zip(values, weights, heads, strict=True):
                n_compared += 1 + n_below + (len(above) - 1) * n_below
                products[1:, 0] = 0.0  # two heads, which have been met with the lower one in the middle
                for a, b in _largest(products, k):
                    path = (*names[b - 1 : b], name, *([above[a]] if a else []))
                    candidates.append((path, float(products[a, b])))
                new.append(read)
        candidates = sorted(candidates, key=lambda path: -abs(path[1]))[:k]
        readouts = np.concatenate([layer.pull_back(readouts), *([np.stack(new)] if new else [])])
        above += layer.names
    candidates.append(((), float((readouts[0] * model.embedding).sum())))
    candidates = sorted(candidates, key=lambda path: -abs(path[1]))[:k]
    values = np.array([value for _, value in candidates])
    return StrongestPaths(tuple(path for path, _ in candidates), values, n_compared, path_orders(contributions))


@dataclass(frozen=True)
class _Layer:
    """A block: its heads, and what lies between heads."""

    block: FrozenBlock
    attentions: tuple[tuple[str, FrozenHeads], ...]
    others: tuple[Any, ...]

    @classmethod
    def of(cls, block: FrozenBlock) -> _Layer:
        named = list(zip(block.names, block.branches, strict=True))
        attentions = tuple((name, branch) for name, branch in named if isinstance(branch, FrozenHeads))
        return cls(block, attentions, tuple(branch for _, branch in named if not isinstance(branch, FrozenHeads)))

    @property
    def names(self) -> list[str]:
        """All heads, "layer.head"."""
        return [f"{name}.{h}" for name, heads in self.attentions for h in range(len(heads.patterns))]

    def through_after(self, readouts: Array) -> Array:
        """Return readouts (..., n, d) pulled back through the norm behind the block."""
        return readouts if self.block.after is None else self.block.after.adjoint(readouts)

    def pull_back(self, readouts: Array) -> Array:
        """Return readouts behind the layers pulled back around the heads."""
        pulled: Array = readouts + sum(other.pull_back(readouts)[0] for other in self.others)
        return pulled

    def push(self, streams: Array) -> Array:
        """Return streams (m, n, d) before the block after it: those around the heads, then what the heads write."""
        around = streams + sum(other.linear(streams) for other in self.others)
        written = [_write(heads, _values(heads, streams[:1])[0]) for _, heads in self.attentions]
        out: Array = np.concatenate([around, *written])
        return out if self.block.after is None else self.block.after.linear(out)

    def products(self, readouts: Array, streams: Array) -> Iterator[tuple[Array, Array, list[str]]]:
        """Yield of every attention layer the products of all readouts with all streams through its heads.

        They are (heads, readouts, streams), with the first readout pulled back through the heads, (heads, n, d), and
        the names of the heads.
        """
        for name, heads in self.attentions:
            n_heads = len(heads.patterns)
            values, reads = _values(heads, streams), heads.value_readouts(readouts)  # m h n dh
            flat = (a.transpose(1, 0, 2, 3).reshape(n_heads, len(a), -1) for a in (reads, values))
            left, right = flat
            yield (
                left @ right.transpose(0, 2, 1),
                heads.head_adjoints(reads[0]),
                [f"{name}.{h}" for h in range(n_heads)],
            )


def _values(heads: FrozenHeads, streams: Array) -> Array:
    """Return the weighted values of streams (m, n, d), (m, heads, n, d_value)."""
    x = streams if heads.before is None else heads.before.linear(streams)
    values = heads.layer.repeated(np.stack([x @ w for w in heads.layer.W_V]))  # h m n [d] dh
    return np.asarray(heads.weights @ values.swapaxes(0, 1))  # m h n [n'] dh


def _write(heads: FrozenHeads, values: Array) -> Array:
    """Return what each head writes from weighted values (heads, n, d_value), (heads, n, d)."""
    written = values @ heads.output_weights
    return np.asarray(written if heads.behind is None else written / heads.behind.divisors)


def _streams(layers: Sequence[_Layer], embedding: Array) -> Iterator[Array]:
    """Yield the streams before every block: the one without heads, then those that one head has written."""
    streams = embedding[None]
    for layer in layers:
        yield streams
        streams = layer.push(streams)


def _largest(products: Array, k: int) -> Array:
    """Return the indices (k, 2) of the largest entries of a matrix by modulus."""
    flat = np.abs(products).reshape(-1)
    best = np.argpartition(flat, len(flat) - k)[-k:] if k < len(flat) else np.flatnonzero(flat)
    return np.stack(np.unravel_index(best, products.shape), axis=1)


def _check_memory(layers: Sequence[_Layer], embedding: Array) -> None:
    counts = np.cumsum([1, *(len(layer.names) for layer in layers[:-1])])
    n_bytes = int(counts.sum()) * embedding.nbytes
    if n_bytes > MOST_BYTES:
        raise ArgumentError(
            f"strongest_paths: the streams below all heads must fit into {MOST_BYTES >> 30} GiB, got "
            f"{n_bytes / 2**30:.1f} GiB for {len(embedding)} positions; freeze a text of at most "
            f"{len(embedding) * MOST_BYTES // n_bytes}."
        )
