r"""The strongest paths to a logit through any number of heads, of a frozen model of any architecture.

A path goes from the embedding through heads h_1, ..., h_m of ascending layers to the logit. Between heads it takes the
residual stream, norms and feed-forward layers: a linear map B at every position. With r the readout and x the embedding

    value of a path  =  <r, B K_(h_m) B ... K_(h_1) B x>.

The last heads of a path are its suffix, whose readout is r pulled back through them. Below every head h stand the
streams that at most one head has written, and a matrix product with the readouts of all suffixes in the values of h has
their paths with at most one head below h. A suffix is followed further down, with h before it, as long as the values of
all its longer paths together may exceed the k-th strongest one known (branch and bound, with `path_energies`). The
search starts from the k strongest paths through at most two heads, which all stand in the products with r alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib_adapters.circuits.paths.logit_paths import LogitContributions
from tnlib_adapters.circuits.paths.path_energies import norm_bound, path_energies
from tnlib_adapters.circuits.paths.path_layers import PathLayer, streams_of_one_head
from tnlib_adapters.circuits.paths.path_orders import PathOrders, path_orders
from tnlib_adapters.frozen.frozen_heads import pull_back
from tnlib_adapters.result_table import Columns, Table

MOST_BYTES = 2 << 30  # of streams and second moments, which are held at once
MOST_SUFFIXES = 2000  # that are followed; of more, those with the largest bounds
_SLACK = 1.001  # of bounds, above their rounding errors in single precision
_DRAWN = 64  # paths of the picture in a notebook

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class StrongestPaths(Table):
    """Paths to a logit, the strongest first, returned by `strongest_paths`.

    Parameters
    ----------
    paths
        Heads of every path, first layer first, such as ("16.0", "17.3"); () for the path without heads.
    values
        (k,), contribution of every path.
    bound
        No path that is not listed has a value of larger modulus.
    n_paths
        Number of all paths.
    orders
        Parts of the logit by number of heads.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.circuits import logit_contributions
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> frozen = tnlib_adapters.freeze(model, [5, 6, 7, 8, 5, 6])
    >>> found = strongest_paths(logit_contributions(frozen, 7), 2)
    >>> found.paths, found.values.round(1), found.n_paths
    ((('1.0',), ('0.0', '1.0')), array([ 3.2, -0.8]), 25)
    """

    paths: tuple[Path, ...]
    values: Array
    bound: float
    n_paths: int
    orders: PathOrders

    _SHOWN = 12

    @property
    def others(self) -> float:
        """The sum of all paths that are not listed."""
        return float(self.orders.embedding.sum() - self.values.sum())

    @property
    def _title(self) -> str:
        return f"StrongestPaths, {len(self.paths)} of {self.n_paths:.4g} through any number of heads"

    def _columns(self, rows: Any) -> Columns:
        names = np.array([" > ".join((*path, "logit")) for path in self.paths], dtype=object)
        return {"path": names[rows], "value": self.values[rows]}

    def _notes(self) -> list[str]:
        return [
            f"they sum to {self.values.sum():.3f} of {self.orders.total:.3f}; all others sum to {self.others:.3f}, "
            f"each at most {self.bound:.2g}"
        ]

    def _picture(self) -> str:
        return heat_image(self.values[None, :_DRAWN], "values of the paths, strongest first", width=320)


def strongest_paths(contributions: LogitContributions, k: int = 100) -> StrongestPaths:
    """Return the k strongest paths from the embedding to a logit, with a bound on all others.

    Parameters
    ----------
    contributions
        What `logit_contributions` returned, of a token or of any direction such as a difference of logits.
    k
        Number of paths.

    Returns
    -------
    StrongestPaths
        Its `bound` is the k-th value if the search was complete. It is larger if more than 2,000 suffixes of paths had
        to be followed, for a large k.

    Raises
    ------
    ArgumentError
        If streams and second moments do not fit into 2 GiB; freeze a shorter text.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.circuits import logit_contributions
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> frozen = tnlib_adapters.freeze(llama, [5, 6, 7, 8])
    >>> found = strongest_paths(logit_contributions(frozen, 9), 100)
    >>> found.n_paths, bool(found.bound == np.abs(found.values).min())
    (6561, True)
    """
    k = as_count("strongest_paths", "k", k)
    model = contributions.model
    layers = [PathLayer.of(block) for block in model.blocks]
    _check_memory(layers, model.embedding)
    search = _PathSearch.of(layers, contributions)
    start, _ = search.run(k, np.inf)
    candidates, bound = search.run(k, abs(start[-1][1]) if len(start) == k else 0.0)
    n_paths = prod(1 + len(layer.names) for layer in layers)
    if len(candidates) < n_paths:
        bound = max(bound, abs(candidates[-1][1]))
    values = np.array([value for _, value in candidates])
    return StrongestPaths(tuple(path for path, _ in candidates), values, bound, n_paths, path_orders(contributions))


@dataclass(frozen=True)
class _PathSearch:
    """Streams of at most one head and bounds before every block, and the readout behind the last."""

    layers: Sequence[PathLayer]
    streams: Sequence[Array]
    moments: Sequence[Array | None]  # of the streams of some blocks
    value_moments: Sequence[Sequence[Array]]
    readout: Array  # n d

    @classmethod
    def of(cls, layers: Sequence[PathLayer], contributions: LogitContributions) -> _PathSearch:
        model = contributions.model
        streams = list(streams_of_one_head(layers, model.embedding))
        n_bytes = len(layers) * model.embedding.shape[1] * model.embedding.nbytes
        every = 1 + 4 * n_bytes // MOST_BYTES  # so that those of streams take a quarter of the memory
        moments, value_moments = list[Array | None](), list[list[Array]]()
        for number, (of_streams, of_values) in enumerate(path_energies(layers, streams)):
            moments.append(None if number % every else of_streams)
            value_moments.append(of_values)
        readout, _ = pull_back(model.final_norm, contributions.readout)
        return cls(layers, streams, moments[:-1], value_moments[:-1], readout)

    def run(self, k: int, threshold: float) -> tuple[list[tuple[Path, float]], float]:
        """Return the k strongest paths with their values, and the largest bound of the suffixes above `MOST_SUFFIXES`.

        Suffixes are followed if their paths may exceed the threshold: for infinity, paths have at most two heads.
        """
        names = [name for layer in self.layers for name in layer.names]
        readouts, suffixes, dropped_bound = self.readout[None], list[Path]([()]), 0.0
        candidates: list[tuple[Path, float]] = []
        for number in reversed(range(len(self.layers))):
            layer, streams = self.layers[number], self.streams[number]
            readouts, _ = pull_back(layer.after, readouts)
            new, new_suffixes = list[Array](), list[Path]()
            for (name, heads), moments in zip(layer.attentions, self.value_moments[number], strict=True):
                values = heads.values_of(streams).swapaxes(0, 1)  # h b n dh
                reads = heads.value_readouts(readouts).swapaxes(0, 1)  # h a n dh
                for h, products in enumerate(_flat(reads) @ _flat(values).swapaxes(1, 2)):  # a [n dh] b
                    products[1:, 0] = 0.0  # met with a shorter suffix
                    candidates += [
                        ((*names[b - 1 : b], f"{name}.{h}", *suffixes[a]), float(products[a, b]))
                        for a, b in _largest(products, k)
                    ]
                    followed = np.flatnonzero(_SLACK * norm_bound(reads[h], moments[h]) > threshold)
                    new.append(heads.head_adjoint(h, reads[h, followed]))
                    new_suffixes += [(f"{name}.{h}", *suffixes[a]) for a in followed]
            readouts, suffixes = np.concatenate([layer.pull_back(readouts), *new]), suffixes + new_suffixes
            candidates = sorted(candidates, key=lambda path: -abs(path[1]))[:k]
            if len(candidates) == k:
                threshold = max(threshold, abs(candidates[-1][1]))
            of_streams = self.moments[number]
            if of_streams is not None:
                bounds = _SLACK * norm_bound(readouts[1:], of_streams)
                order = np.argsort(-bounds)
                order = order[: np.count_nonzero(bounds > threshold)]
                dropped_bound = max(dropped_bound, *bounds[order[MOST_SUFFIXES:]][:1], 0.0)
                kept = np.concatenate([[0], 1 + np.sort(order[:MOST_SUFFIXES])])
                readouts, suffixes = readouts[kept], [suffixes[a] for a in kept]
        candidates.append(((), float((readouts[0] * self.streams[0][0]).sum())))
        return sorted(candidates, key=lambda path: -abs(path[1]))[:k], dropped_bound


def _flat(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1)


def _largest(products: Array, k: int) -> Array:
    """Return the indices (k, 2) of the largest entries of a matrix by modulus, of those that are not zero."""
    flat = np.abs(products).reshape(-1)
    best = np.argpartition(flat, len(flat) - k)[-k:] if k < len(flat) else np.arange(len(flat))
    return np.stack(np.unravel_index(best[flat[best] > 0], products.shape), axis=1)


def _check_memory(layers: Sequence[PathLayer], embedding: Array) -> None:
    n, d = embedding.shape
    counts = np.cumsum([1, *(len(layer.names) for layer in layers[:-1])])
    shapes = (heads.layer.W_O.shape for layer in layers for _, heads in layer.attentions)
    of_values = sum(n_heads * width**2 for n_heads, width, _ in shapes)
    n_bytes = (int(counts.sum()) * d + of_values + 4 * d**2) * n * embedding.itemsize
    if n_bytes > MOST_BYTES:
        raise ArgumentError(
            f"strongest_paths: streams and second moments must fit into {MOST_BYTES >> 30} GiB, got "
            f"{n_bytes / 2**30:.1f} GiB for {n} positions; freeze a text of at most {n * MOST_BYTES // n_bytes}."
        )
