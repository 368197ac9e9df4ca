"""Heads truncated where the text does not miss it: directions by moments, ranks by gates, layers fitted again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.factored import Piece, columns_of, places
from tnlib_adapters.checkpoints.pivoted import pack
from tnlib_adapters.checkpoints.projections import Projections, Sizes
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.cuts import Cut
from tnlib_adapters.compression.moments import KINDS


class CalibratedHeads:
    """The operators of every head, [W_Q; b_Q] [W_K; b_K]^T and W_V W_O, with the units that the text misses least gone.

    The bias of the keys is dropped where softmax does not see it, without rotary embeddings; that of the values
    goes into the output bias where there is one. Heads that share a key and value head keep the same.
    """

    def __init__(
        self, projections: Projections, sizes: Sizes, cuts: Mapping[str, Cut], gates: Mapping[str, Array]
    ) -> None:
        self._projections = fold_biases(projections, sizes, keys=not cuts["qk"].in_place)
        self._sizes, self._cuts = sizes, cuts
        self._had = frozenset(projections.biases)
        self._dtype = projections.weights["q"].dtype
        self._order = {kind: np.argsort(-gates[kind], axis=1, kind="stable") for kind in KINDS}
        self.curves = [self._curve(kind, gates[kind][g], self._order[kind][g]) for kind in KINDS for g in self._groups]
        if "o" in self._had:  # the output bias is stored with the last operator, whatever its rank
            self.curves[-1] = Curve(self.curves[-1].costs + sizes.d_model, self.curves[-1].errors)
        self.fixed = 0

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors with choice[k] units of the k-th key head's operators, all QK first."""
        return self.packed(self.truncated(choice), choice)

    def truncated(self, choice: Sequence[int]) -> Projections:
        """Return dense projections with so many units, all other columns of each head zero."""
        old = self._projections
        weights = {name: np.zeros(value.shape) for name, value in old.weights.items()}
        biases = {name: np.zeros(value.shape) for name, value in old.biases.items()}
        biases |= {"o": old.biases["o"].copy()} if "o" in old.biases else {}
        for kind, group, units in self._chosen(choice):
            components, columns = self._components(kind, group, units), self._columns(kind, group, units)
            for name, side in zip(kind, (self._cuts[kind].left, self._cuts[kind].right), strict=True):
                for head, own in self._heads(name, group):
                    turn, into = side[head][:, components], own.start + np.array(columns, int)
                    if name == "o":
                        weights[name][into] = turn.T @ old.weights[name][own]
                    else:
                        weights[name][:, into] = old.weights[name][:, own] @ turn
                        if name in old.biases:
                            biases[name][into] = old.biases[name][own] @ turn
        return Projections(weights, biases)

    def free(self, choice: Sequence[int]) -> Projections:
        """Return 1 for every number that a truncation stores, 0 for the others."""
        inner = {name: np.zeros(width) for name, width in self._sizes.widths.items()}
        for kind, group, units in self._chosen(choice):
            for name in list(kind):
                for _, own in self._heads(name, group):
                    inner[name][own.start + np.array(self._columns(kind, group, units), int)] = 1
        old = self._projections
        weights = {
            name: np.ones(value.shape) * (inner[name][:, None] if name == "o" else inner[name])
            for name, value in old.weights.items()
        }
        biases = {
            name: np.ones(value.shape) if name == "o" else inner[name] * bool(np.any(value))
            for name, value in old.biases.items()
        }
        return Projections(weights, biases)

    def packed(self, dense: Projections, choice: Sequence[int]) -> list[Piece]:
        """Return the pieces that hold truncated projections."""
        kept: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
        for kind, group, units in self._chosen(choice):
            kept[kind].append(self._columns(kind, group, units))
        return [
            self._planes(dense, kept[kind]) if self._cuts[kind].in_place else self._pivoted(kind, dense, kept[kind])
            for kind in KINDS
        ]

    def _planes(self, dense: Projections, kept: Sequence[Sequence[int]]) -> Piece:
        parts = []
        for name in ("q", "k"):
            filled = places(columns_of(name, kept, self._sizes), self._sizes.d_head)
            rows = dense.weights[name]
            if name in dense.biases:
                rows = np.concatenate([rows, dense.biases[name][None]])
            parts.append(rows[:, filled])
        arrays = {"left": parts[0].astype(self._dtype), "right": parts[1].T.astype(self._dtype)}
        held = "".join(name for name in ("q", "k") if name in self._had)
        return Piece("planes", "qk", arrays, tuple(map(len, kept)), tuple(map(tuple, kept)), held)

    def _pivoted(self, kind: str, dense: Projections, kept: Sequence[Sequence[int]]) -> Piece:
        lefts, rights, rows = [], [], []
        for group, columns in enumerate(kept):
            ((_, own),) = self._heads(kind[0], group)
            left = self._with_bias(kind, dense)[:, own][:, columns]
            right = [
                dense.weights["o"][head][columns] if kind == "vo" else dense.weights["k"][:, head][:, columns].T
                for _, head in self._heads(kind[1], group)
            ]
            rest, together, pivots = pack(left, np.concatenate(right, axis=1))
            lefts.append(rest.ravel())
            rights += np.split(together, len(right), axis=1)
            rows.append(pivots)
        arrays = {"left": np.concatenate(lefts), "right": np.concatenate(rights)}
        if kind == "vo" and "o" in self._had:
            arrays["bias"] = dense.biases["o"]
        held = "".join(name for name in list(kind) if name in self._had)
        arrays = {part: a.astype(self._dtype) for part, a in arrays.items()}
        return Piece("pivoted", kind, arrays, tuple(map(len, rows)), tuple(rows), held)

    def _curve(self, kind: str, losses: Array, order: Array) -> Curve:
        """Return what 0, 1, ... units cost and lose; r columns cost no r^2 numbers of the gauge, but their places."""
        cut, s = self._cuts[kind], self._sizes
        sizes = [len(cut.units[unit]) for unit in order]
        r = np.append(0, np.cumsum(sizes))
        m = len(self._with_bias(kind, self._projections))
        if cut.in_place:
            costs = r * (m * cut.group + s.d_model + ("k" in self._had) + 1)
        else:
            costs = r * (m + s.d_model * (cut.group if kind == "vo" else 1) + 1) - r**2
        return Curve(costs, np.append(np.cumsum(losses[order][::-1])[::-1], 0.0))

    def _with_bias(self, kind: str, projections: Projections) -> Array:
        """Return the left weights, with their bias as a last row if that counts."""
        first = kind[0]
        weight = projections.weights[first]
        if first not in projections.biases or (kind == "vo" and "o" in projections.biases):
            return weight
        return np.concatenate([weight, projections.biases[first][None]])

    @property
    def _groups(self) -> range:
        return range(self._sizes.kv_heads)

    def _chosen(self, choice: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """Yield the kind, the key head, and its count of units."""
        blocks = ((kind, group) for kind in KINDS for group in self._groups)
        for (kind, group), units in zip(blocks, choice, strict=True):
            yield kind, group, units

    def _components(self, kind: str, group: int, units: int) -> list[int]:
        chosen = self._order[kind][group][:units]
        found = [component for unit in chosen for component in self._cuts[kind].units[unit]]
        return sorted(found) if self._cuts[kind].in_place else found

    def _columns(self, kind: str, group: int, units: int) -> list[int]:
        """Return the columns of a head that the components fill."""
        found = self._components(kind, group, units)
        return found if self._cuts[kind].in_place else list(range(len(found)))

    def _heads(self, name: str, group: int) -> list[tuple[int, slice]]:
        """Return the query heads that a key head stands for, with their parts of a projection; of "k", "v" only one."""
        size, d = self._sizes.n_heads // self._sizes.kv_heads, self._sizes.d_head
        if name in "qo":
            return [(head, slice(head * d, (head + 1) * d)) for head in range(group * size, (group + 1) * size)]
        return [(group * size, slice(group * d, (group + 1) * d))]


def fold_biases(projections: Projections, sizes: Sizes, *, keys: bool) -> Projections:
    """Return float64 projections with b_K = 0 if `keys`, and, where the layer has an output bias, b_V in it."""
    weights = {name: value.astype(np.float64) for name, value in projections.weights.items()}
    biases = {name: value.astype(np.float64) for name, value in projections.biases.items()}
    if keys and "k" in biases:
        biases["k"] = np.zeros_like(biases["k"])
    if "v" in biases and "o" in biases:
        by_head = np.repeat(biases["v"].reshape(sizes.kv_heads, -1), sizes.n_heads // sizes.kv_heads, axis=0)
        biases["o"] = biases["o"] + by_head.ravel() @ weights["o"]  # every row of a pattern sums to 1
        biases["v"] = np.zeros_like(biases["v"])
    return Projections(weights, biases)
