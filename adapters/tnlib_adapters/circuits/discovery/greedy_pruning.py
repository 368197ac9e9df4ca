"""Greedy and first-order pruning of gated terms within a loss budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from tnlib._typing import Array

By = Literal["greedy", "gradient"]


class Gated(Protocol):
    """A loss as a function of gates (terms,), 1 for a present term and 0 for a removed one."""

    names: tuple[str, ...]

    def loss(self, gates: Array) -> float:
        """Return the loss."""

    def losses_without(self, gates: Array, terms: Array) -> Array:
        """Return the loss with each of `terms` removed, one at a time, (len(terms),)."""

    def first_order(self, gates: Array) -> Array:
        """Return the first-order increase of the loss from removing each term, (terms,)."""


@dataclass(frozen=True, eq=False)
class Pruned:
    """Gates (terms,), 1 for remaining terms; the removed terms in order; and the loss after each removal."""

    gates: Array
    removed: list[int]
    losses: list[float]


def prune(model: Gated, limit: float, by: By) -> Pruned:
    """Remove terms while the loss stays at most `limit`."""
    return _greedy(model, limit) if by == "greedy" else _by_gradient(model, limit)


def _greedy(model: Gated, limit: float) -> Pruned:
    """Repeatedly remove the term whose removal costs least; at the end no single term can be removed.

    The cost of a term is the last one measured. The cheapest term is measured again until it remains the cheapest, and
    all terms are measured again before the search ends (lazy greedy).
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
    """Try to remove terms in order of first-order effect; a term whose removal would exceed `limit` stays for good.

    The exact loss is needed because a saturated softmax has a nearly zero derivative with respect to its scores.
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
