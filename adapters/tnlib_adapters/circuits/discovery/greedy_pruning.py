"""Taking terms out one by one for as long as a loss allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from tnlib._typing import Array

By = Literal["greedy", "gradient"]


class Gated(Protocol):
    """A loss that depends on gates (terms,), 1 where a term is there and 0 where it is not."""

    names: tuple[str, ...]

    def loss(self, gates: Array) -> float:
        """Return the loss."""

    def losses_without(self, gates: Array, terms: Array) -> Array:
        """Return the loss with each of some terms missing, one at a time."""

    def first_order(self, gates: Array) -> Array:
        """Return what each term's removal adds to the loss, to first order."""


@dataclass(frozen=True, eq=False)
class Pruned:
    """Gates (terms,) that are left at 1, the terms that went in order, and the loss after each."""

    gates: Array
    removed: list[int]
    losses: list[float]


def prune(model: Gated, limit: float, by: By) -> Pruned:
    """Take out terms while the loss stays at most `limit`."""
    return _greedy(model, limit) if by == "greedy" else _by_gradient(model, limit)


def _greedy(model: Gated, limit: float) -> Pruned:
    """Take out the term whose removal costs least, again and again; at the end no single one can go.

    Costs are those of the last look at a term. The cheapest is looked at again until it stays the cheapest, and all of
    them are before the search ends.
    """
    gates, removed, losses = np.ones(len(model.names)), [], []
    loss, costs = model.loss(gates), np.full(len(gates), -np.inf)
    fresh = np.zeros(len(gates), bool)
    while gates.any():
        stale = np.flatnonzero(gates.astype(bool) & ~fresh)
        term = int(np.where(gates.astype(bool), costs, np.inf).argmin())
        if fresh[term] and loss + costs[term] <= limit:
            gates[term], loss = 0, loss + costs[term]
            removed.append(term)
            losses.append(loss)
            fresh[:] = False
            continue
        if not len(stale):
            break
        look = np.array([term]) if not fresh[term] and np.isfinite(costs[term]) else stale
        costs[look] = model.losses_without(gates, look) - loss
        fresh[look] = True
    return Pruned(gates, removed, losses)


def _by_gradient(model: Gated, limit: float) -> Pruned:
    """Try the term with the smallest effect to first order; where the loss itself forbids it, it stays for good.

    First order alone would not do: a softmax that has made up its mind hardly feels a small change of its scores.
    """
    gates, removed, losses = np.ones(len(model.names)), [], []
    open_ = np.ones(len(gates), bool)
    effects = np.abs(model.first_order(gates))
    while open_.any():
        term = int(np.where(open_, effects, np.inf).argmin())
        open_[term] = False
        gates[term] = 0
        loss = model.loss(gates)
        if loss > limit:
            gates[term] = 1
            continue
        removed.append(term)
        losses.append(loss)
        effects = np.abs(model.first_order(gates))
    return Pruned(gates, removed, losses)
