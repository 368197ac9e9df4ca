"""Search for the terms whose removal keeps a loss within a limit: greedy, by gradient, ACDC, attribution patching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from tnlib._typing import Array

By = Literal["greedy", "gradient", "acdc", "attribution", "integrated"]

N_STEPS = 5  # midpoints of the integral of gradients: more change the ranking of edges little
_HALVINGS = 12  # thresholds that ACDC tries, before a threshold of zero


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
    """Gates (terms,), 1 for remaining terms; the removed terms; the loss after each removal, NaN if unknown."""

    gates: Array
    removed: list[int]
    losses: list[float]


def prune(model: Gated, limit: float, by: By) -> Pruned:
    """Remove terms while the loss stays at most `limit`."""
    return _SEARCHES[by](model, limit)


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


def _acdc(model: Gated, limit: float) -> Pruned:
    """Sweep over the terms from the last one, and remove those that cost at most a threshold.

    The threshold is the whole increase that is allowed, halved until the loss after the sweep is at most `limit`.
    """
    allowed = limit - model.loss(np.ones(len(model.names)))
    for threshold in [allowed * 0.5**k for k in range(_HALVINGS)]:
        pruned = _sweep(model, limit, threshold)
        if pruned is not None:
            return pruned
    pruned = _sweep(model, np.inf, 0.0)
    return pruned if pruned is not None else Pruned(np.ones(len(model.names)), [], [])


def _sweep(model: Gated, limit: float, threshold: float) -> Pruned | None:
    """Return what one sweep removes, None once the loss exceeds `limit`."""
    gates, removed, losses = np.ones(len(model.names)), [], []
    loss = model.loss(gates)
    for term in reversed(range(len(gates))):
        without = float(model.losses_without(gates, np.array([term]))[0])
        if without - loss > threshold:
            continue
        gates[term], loss = 0, without
        if loss > limit:
            return None
        removed.append(term)
        losses.append(loss)
    return Pruned(gates, removed, losses)


def integrated_effects(model: Gated) -> Array:
    """Return first-order effects averaged over models with all gates at 0.1, 0.3, ..., 0.9, (terms,).

    The sum over terms is the midpoint rule for the difference of the loss between no terms and all of them.
    """
    at = (np.arange(N_STEPS) + 0.5) / N_STEPS
    return np.asarray(np.mean([model.first_order(np.full(len(model.names), gate)) for gate in at], axis=0))


def _by_attribution(model: Gated, limit: float) -> Pruned:
    return _of_largest(model, model.first_order(np.ones(len(model.names))), limit)


def _by_integration(model: Gated, limit: float) -> Pruned:
    return _of_largest(model, integrated_effects(model), limit)


def _of_largest(model: Gated, effects: Array, limit: float) -> Pruned:
    """Keep the terms with the largest effects (terms,), as few as bisection finds to meet `limit`."""
    order = np.argsort(np.abs(effects), kind="stable")  # smallest first
    rejected, kept = -1, len(order)
    losses = np.full(len(order) + 1, np.nan)  # by number of kept terms
    while kept - rejected > 1:
        middle = (kept + rejected) // 2
        losses[middle] = model.loss(_of_last(order, middle))
        rejected, kept = (rejected, middle) if losses[middle] <= limit else (middle, kept)
    removed = order[: len(order) - kept]
    after_each = losses[len(order) - 1 - np.arange(len(removed))]
    return Pruned(_of_last(order, kept), removed.tolist(), after_each.tolist())


def _of_last(order: Array, n: int) -> Array:
    gates = np.zeros(len(order))
    gates[order[len(order) - n :]] = 1
    return gates


_SEARCHES: Mapping[By, Callable[[Gated, float], Pruned]] = {
    "greedy": _greedy,
    "gradient": _by_gradient,
    "acdc": _acdc,
    "attribution": _by_attribution,
    "integrated": _by_integration,
}
