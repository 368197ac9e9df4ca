"""Heads truncated where the text does not miss it: directions by moments, ranks by gates, layers fitted again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.checkpoints.pivoted import pack
from tnlib_adapters.checkpoints.projections import Projections, Sizes
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.moments import KINDS, Moments
from tnlib_adapters.compression.plan import Factorisation, Plan, Progress
from tnlib_adapters.compression.statistics import collect, measure_gates

if TYPE_CHECKING:
    from tnlib_adapters.torch.hooks.running import Batch

# Moments and gates settle early; the fit has as many unknowns as a layer.
_TOKENS_OF_STATISTICS = 16_384
_TOKENS_OF_FIT = 65_536
_STEPS = 200  # of descent in every layer


@dataclass(frozen=True)
class _Side:
    """The components of one kind of operator in one layer, each head's in the order in which they matter."""

    left: Array  # (heads, d_head, d_head)
    right: Array
    losses: Array  # (heads, d_head), descending


class CalibratedHeads:
    """The products [W_Q; b_Q] W_K^T and W_V W_O of every head, truncated by moments and gates.

    The bias of the keys is dropped, since softmax does not see it; that of the values goes into the output bias.
    """

    def __init__(self, projections: Projections, sizes: Sizes, moments: Moments, gates: dict[str, Array]) -> None:
        self._projections = fold_biases(projections, sizes)
        self._sizes = sizes
        self._had = frozenset(projections.biases)
        self._dtype = projections.weights["q"].dtype
        self._sides = {kind: _ordered(*moments.components(kind), gates[kind]) for kind in KINDS}
        self.curves = [
            _curve(side.losses[head], len(_left(self._projections, kind, sizes, head)), sizes.d_model)
            for kind, side in self._sides.items()
            for head in range(sizes.n_heads)
        ]
        if "o" in self._had:  # the output bias is stored with the last operator, whatever its rank
            self.curves[-1] = Curve(self.curves[-1].costs + sizes.d_model, self.curves[-1].errors)
        self.fixed = 0

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors with rank choice[k] for the k-th operator, all QK first."""
        n = self._sizes.n_heads
        return self.packed(self.truncated(choice[:n], choice[n:]), choice[:n], choice[n:])

    def truncated(self, qk: Sequence[int], vo: Sequence[int]) -> Projections:
        """Return dense projections of these ranks, the columns of each head beyond its rank zero."""
        old, s = self._projections, self._sizes
        weights = {name: np.zeros(value.shape) for name, value in old.weights.items()}
        biases = {name: np.zeros(value.shape) for name, value in old.biases.items()}
        biases |= {"o": old.biases["o"].copy()} if "o" in old.biases else {}
        for kind, ranks in zip(KINDS, (qk, vo), strict=True):
            first, second = list(kind)
            side = self._sides[kind]
            for head, r in enumerate(ranks):
                own = slice(head * s.d_head, (head + 1) * s.d_head)
                into = slice(head * s.d_head, head * s.d_head + r)
                left, right = side.left[head][:, :r], side.right[head][:, :r]
                weights[first][:, into] = old.weights[first][:, own] @ left
                if first in old.biases:
                    biases[first][into] = old.biases[first][own] @ left
                if second == "o":
                    weights["o"][into] = right.T @ old.weights["o"][own]
                else:
                    weights[second][:, into] = old.weights[second][:, own] @ right
        return Projections(weights, biases)

    def free(self, qk: Sequence[int], vo: Sequence[int]) -> Projections:
        """Return 1 for every number that a truncation of these ranks stores, 0 for the others."""
        s, old = self._sizes, self._projections
        inner = {
            name: np.concatenate([np.arange(s.d_head) < r for r in ranks]).astype(np.float64)
            for kind, ranks in zip(KINDS, (qk, vo), strict=True)
            for name in kind
        }
        weights = {
            name: np.ones(value.shape) * (inner[name][:, None] if name == "o" else inner[name])
            for name, value in old.weights.items()
        }
        biases = {
            name: np.ones(value.shape) if name == "o" else inner[name] * bool(np.any(value))
            for name, value in old.biases.items()
        }
        return Projections(weights, biases)

    def packed(self, dense: Projections, qk: Sequence[int], vo: Sequence[int]) -> list[Piece]:
        """Return the pieces that hold truncated projections."""
        return [self._pack(kind, dense, ranks) for kind, ranks in zip(KINDS, (qk, vo), strict=True)]

    def _pack(self, kind: str, dense: Projections, ranks: Sequence[int]) -> Piece:
        s = self._sizes
        lefts, rights, rows = [], [], []
        for head, r in enumerate(ranks):
            left = _left(dense, kind, s, head)[:, :r]
            into = slice(head * s.d_head, head * s.d_head + r)
            right = dense.weights["o"][into] if kind == "vo" else dense.weights["k"][:, into].T
            rest, right, pivots = pack(left, right)
            lefts.append(rest.ravel())
            rights.append(right)
            rows.append(pivots)
        arrays: dict[str, Array] = {"left": np.concatenate(lefts), "right": np.concatenate(rights)}
        if kind == "vo" and "o" in self._had:
            arrays["bias"] = dense.biases["o"]
        held = "".join(name for name in (kind if kind == "vo" else "qk") if name in self._had)
        arrays = {part: a.astype(self._dtype) for part, a in arrays.items()}
        return Piece("pivoted", kind, arrays, tuple(map(len, rows)), tuple(rows), held)


def fold_biases(projections: Projections, sizes: Sizes) -> Projections:
    """Return float64 projections with b_K = 0, and, where the layer has an output bias, b_V in it."""
    weights = {name: value.astype(np.float64) for name, value in projections.weights.items()}
    biases = {name: value.astype(np.float64) for name, value in projections.biases.items()}
    if "k" in biases:
        biases["k"] = np.zeros_like(biases["k"])
    if "v" in biases and "o" in biases:
        biases["o"] = biases["o"] + biases["v"] @ weights["o"]  # every row of a pattern sums to 1
        biases["v"] = np.zeros_like(biases["v"])
    return Projections(weights, biases)


def _left(projections: Projections, kind: str, sizes: Sizes, head: int) -> Array:
    """Return the left factor of a head's operator, (d_model, d_head), its bias as a last row if that counts."""
    first = kind[0]
    own = slice(head * sizes.d_head, (head + 1) * sizes.d_head)
    weight = projections.weights[first][:, own]
    if first not in projections.biases or (kind == "vo" and "o" in projections.biases):
        return weight
    return np.concatenate([weight, projections.biases[first][None, own]])


def _ordered(left: Array, right: Array, losses: Array) -> _Side:
    order = np.argsort(-losses, axis=1, kind="stable")[:, None, :]
    return _Side(
        np.take_along_axis(left, order, 2),
        np.take_along_axis(right, order, 2),
        np.take_along_axis(losses, order[:, 0], 1),
    )


def _curve(losses: Array, m: int, n: int) -> Curve:
    """Return what ranks 0, 1, ... cost, without the r^2 numbers of the gauge but with r for its rows, and lose."""
    ranks = np.arange(len(losses) + 1)
    return Curve(ranks * (m + n) - ranks**2 + ranks, np.append(np.cumsum(losses[::-1])[::-1], 0.0))


def calibrate(checkpoint: Checkpoint, text: str, keep: float, progress: Progress) -> Plan:
    """Return the factors of a fraction `keep` of the numbers, by what a text shows of the running model.

    Raises
    ------
    ArgumentError
        If the text is too short, or the fraction cannot be met.
    """
    from tnlib_adapters.torch.hooks.local import fit_layers
    from tnlib_adapters.torch.hooks.running import open_running

    model = open_running(checkpoint.folder.path)
    batches = model.batches(text)
    sizes, n_tokens = checkpoint.sizes, sum(batch.n_tokens for batch in batches)
    if n_tokens < sizes.widths["o"]:
        raise ArgumentError(
            f"compress: the text of calibrate must have at least {sizes.widths['o']:,} tokens for heads of together "
            f"{sizes.widths['o']:,} dimensions, got {n_tokens:,}, {sizes.widths['o'] - n_tokens:,} too few; add text."
        )
    some = _some(batches, _TOKENS_OF_STATISTICS)
    moments = collect(model, some, progress)
    gates = measure_gates(model, some, moments, progress)
    projections = [checkpoint.projections(layer) for layer in range(checkpoint.n_layers)]
    heads = [CalibratedHeads(one, sizes, moments[layer], gates[layer]) for layer, one in enumerate(projections)]
    n_before = sum(a.size for one in projections for a in [*one.weights.values(), *one.biases.values()])
    plan = Factorisation("heads", heads, n_before).plan(keep, progress)
    ranks = [tuple(piece.ranks for piece in pieces) for pieces in plan.layers]
    fitted = fit_layers(
        model,
        _some(batches, _TOKENS_OF_FIT),
        lambda k: heads[k].truncated(*ranks[k]),
        lambda k: heads[k].free(*ranks[k]),
        n_steps=_STEPS,
        progress=progress,
    )
    layers = [one.packed(dense, *chosen) for one, dense, chosen in zip(heads, fitted, ranks, strict=True)]
    return replace(plan, layers=layers)


def _some(batches: Sequence[Batch], n_tokens: int) -> list[Batch]:
    """Return batches of together about so many tokens, drawn at random by a fixed seed."""
    chosen, count = [], 0
    for k in np.random.default_rng(0).permutation(len(batches)):
        if count >= n_tokens:
            break
        chosen.append(batches[k])
        count += batches[k].n_tokens
    return chosen
