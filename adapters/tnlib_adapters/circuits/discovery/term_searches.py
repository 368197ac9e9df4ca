"""Searches for the terms that a loss needs: greedy, by gradients, by estimated effects, and ACDC."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from tnlib._typing import Array

By = Literal["greedy", "gradient", "acdc", "attribution", "integrated"]

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of all terms, sizes of circuits in MIB
_ON_THE_WAY = (0.1, 0.3, 0.5, 0.7, 0.9)  # midpoints of the integral of gradients: more change the ranking little
_HALVINGS = 12  # thresholds that ACDC tries, before a threshold of zero
MANY = 10_000  # terms of a search that takes so long that its cost is logged before it starts
_LOG = logging.getLogger(__name__)


class Gated(Protocol):
    """A loss as a function of gates (terms,), 1 for a present term and 0 for a removed one."""

    names: tuple[str, ...]

    def loss(self, gates: Array) -> float:
        """Return the loss."""

    def losses_without(self, gates: Array, terms: Array) -> Array:
        """Return the loss with each of `terms` removed, one at a time, (len(terms),)."""

    def first_order(self, gates: Array) -> Array:
        """Return the first-order increase of the loss from removing each term, (terms,)."""

    def first_order_between(self, fraction: float) -> Array:
        """Return the same with the gradients of a run at this fraction of the way from no terms to all of them."""


@dataclass(frozen=True, eq=False)
class Pruned:
    """Terms that remain after a search, and what was measured on the way.

    Parameters
    ----------
    gates
        (terms,), 1 for remaining terms.
    removed
        The removed terms, in order.
    losses
        Loss of circuits by their number of terms, as far as measured.
    effects
        (terms,), estimates that ranked the terms; None for searches that measure.
    """

    gates: Array
    removed: list[int]
    losses: dict[int, float] = field(default_factory=dict)
    effects: Array | None = None

    def remove(self, term: int, loss: float) -> None:
        """Remove a term, which leaves this loss."""
        self.gates[term] = 0
        self.removed.append(term)
        self.losses[len(self.gates) - len(self.removed)] = loss


class PartOfTerms:
    """The loss of a model as a function of the gates of some terms; the others are removed."""

    def __init__(self, model: Gated, terms: Array) -> None:
        self._model, self._terms = model, terms
        self.names = tuple(model.names[term] for term in terms)

    def loss(self, gates: Array) -> float:
        """Return the loss."""
        return self._model.loss(self._all(gates))

    def losses_without(self, gates: Array, terms: Array) -> Array:
        """Return the loss with each of `terms` removed, one at a time."""
        return self._model.losses_without(self._all(gates), self._terms[terms])

    def first_order(self, gates: Array) -> Array:
        """Return the first-order increase of the loss from removing each term."""
        return self._model.first_order(self._all(gates))[self._terms]

    def first_order_between(self, fraction: float) -> Array:
        """Return the effects in the whole model."""
        return self._model.first_order_between(fraction)[self._terms]

    def of_all(self, pruned: Pruned) -> Pruned:
        """Return a search of these terms as one of all terms, of which the others were removed first."""
        others = np.setdiff1d(np.arange(len(self._model.names)), self._terms)
        removed = [*others.tolist(), *self._terms[pruned.removed].tolist()]
        effects = None if pruned.effects is None else self._all(pruned.effects)
        return Pruned(self._all(pruned.gates), removed, pruned.losses, effects)

    def _all(self, values: Array) -> Array:
        """Return values of these terms as values of all terms, 0 for the others."""
        of_all = np.zeros(len(self._model.names))
        of_all[self._terms] = values
        return of_all


def prune(model: Gated, limit: float, by: By) -> Pruned:
    """Remove terms while the loss stays at most `limit`."""
    least = _LEAST_EVALUATIONS.get(by, 0) * len(model.names)
    if least > MANY:
        _LOG.warning("search %r of %d terms: at least %d evaluations of the loss", by, len(model.names), least)
    return _SEARCHES[by](model, limit)


def _greedy(model: Gated, limit: float) -> Pruned:
    """Repeatedly remove the term whose removal costs least; at the end no single term can be removed.

    The cost of a term is the last one measured. The cheapest term is measured again until it remains the cheapest, and
    all terms are measured again before the search ends (lazy greedy).
    """
    pruned = Pruned(np.ones(len(model.names)), [])
    gates = pruned.gates
    loss, costs = model.loss(gates), np.full(len(gates), -np.inf)
    fresh = np.zeros(len(gates), bool)
    while gates.any():
        stale = np.flatnonzero(gates.astype(bool) & ~fresh)
        term = int(np.where(gates.astype(bool), costs, np.inf).argmin())
        if fresh[term] and loss + costs[term] <= limit:
            loss += costs[term]
            pruned.remove(term, loss)
            _LOG.info("greedy search: %d of %d terms remain, loss %.4f", gates.sum(), len(gates), loss)
            fresh[:] = False
            continue
        if not len(stale):
            break
        look = np.array([term]) if not fresh[term] and np.isfinite(costs[term]) else stale
        costs[look] = model.losses_without(gates, look) - loss
        fresh[look] = True
    return pruned


def _by_gradient(model: Gated, limit: float) -> Pruned:
    """Try to remove terms in order of first-order effect; a term whose removal would exceed `limit` stays for good.

    The exact loss is needed because a saturated softmax has a nearly zero derivative with respect to its scores.
    """
    pruned = Pruned(np.ones(len(model.names)), [])
    gates = pruned.gates
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
        pruned.remove(term, loss)
        _LOG.info("search by gradient: %d of %d terms remain, loss %.4f", gates.sum(), len(gates), loss)
        effects = np.abs(model.first_order(gates))
    return pruned


def _acdc(model: Gated, limit: float) -> Pruned:
    """Sweep over the terms from the last one, and remove those that cost at most a threshold.

    The threshold is the whole increase that is allowed, halved until the loss after the sweep is at most `limit`.
    """
    allowed = limit - model.loss(np.ones(len(model.names)))
    for threshold in [allowed * 0.5**k for k in range(_HALVINGS)]:
        _LOG.info("ACDC: sweep with threshold %.4g", threshold)
        pruned = _sweep(model, limit, threshold)
        if pruned is not None:
            return pruned
    pruned = _sweep(model, np.inf, 0.0)
    return pruned if pruned is not None else Pruned(np.ones(len(model.names)), [])


def _sweep(model: Gated, limit: float, threshold: float) -> Pruned | None:
    """Return what one sweep removes, None once the loss exceeds `limit`."""
    pruned = Pruned(np.ones(len(model.names)), [])
    loss = model.loss(pruned.gates)
    for term in reversed(range(len(pruned.gates))):
        if term % 100 == 99:
            _LOG.info("ACDC: %d terms ahead, loss %.4f", term + 1, loss)
        without = float(model.losses_without(pruned.gates, np.array([term]))[0])
        if without - loss > threshold:
            continue
        loss = without
        if loss > limit:
            return None
        pruned.remove(term, loss)
    return pruned


def integrated_effects(first_order_between: Callable[[float], Array]) -> Array:
    """Return first-order effects averaged over runs 0.1, 0.3, ..., 0.9 of the way to the model, (terms, ...).

    Where these runs have all gates at that fraction, the sum over terms is the midpoint rule for the difference of the
    loss between no terms and all of them.
    """
    return np.asarray(np.mean([first_order_between(fraction) for fraction in _ON_THE_WAY], axis=0))


def _by_attribution(model: Gated, limit: float) -> Pruned:
    return _of_largest(model, model.first_order(np.ones(len(model.names))), limit)


def _by_integration(model: Gated, limit: float) -> Pruned:
    return _of_largest(model, integrated_effects(model.first_order_between), limit)


def _of_largest(model: Gated, effects: Array, limit: float) -> Pruned:
    """Keep the terms with the largest effects (terms,), as few as meet `limit`.

    Circuits of `FRACTIONS` of all terms are measured, then bisection searches between the smallest of them that meets
    the limit and the next smaller one.
    """
    order = np.argsort(np.abs(effects), kind="stable")  # smallest first
    losses: dict[int, float] = {}

    def meets(kept: int) -> bool:
        losses[kept] = model.loss(of_last(order, kept))
        _LOG.info("%d of %d terms: loss %.4f", kept, len(order), losses[kept])
        return losses[kept] <= limit

    sizes = sorted({math.ceil(fraction * len(order)) for fraction in FRACTIONS})
    met = [size for size in sizes if meets(size)]
    kept = min(met, default=len(order))
    rejected = max((size for size in sizes if size < kept), default=-1)
    while kept - rejected > 1:
        middle = (kept + rejected) // 2
        rejected, kept = (rejected, middle) if meets(middle) else (middle, kept)
    return Pruned(of_last(order, kept), order[: len(order) - kept].tolist(), losses, effects)


def of_last(order: Array, n: int) -> Array:
    """Return gates (terms,) that keep the last n terms of an order."""
    gates = np.zeros(len(order))
    gates[order[len(order) - n :]] = 1
    return gates


_LEAST_EVALUATIONS: Mapping[By, int] = {"greedy": 2, "gradient": 1, "acdc": 1}  # of each term
_SEARCHES: Mapping[By, Callable[[Gated, float], Pruned]] = {
    "greedy": _greedy,
    "gradient": _by_gradient,
    "acdc": _acdc,
    "attribution": _by_attribution,
    "integrated": _by_integration,
}
