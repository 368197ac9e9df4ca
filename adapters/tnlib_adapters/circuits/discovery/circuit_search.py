"""Circuit discovery: ablate edges, paths or terms of an attention-only model within a loss budget."""

from __future__ import annotations

import numbers
import warnings
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import is_one_of
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.discovery.gated_model import GatedModel
from tnlib_adapters.circuits.discovery.gated_terms import path_terms, ten_terms_by_heads

By = Literal["greedy", "gradient"]
Of = Literal["edges", "terms", "paths"]
_MAKE: dict[str, Any] = {"edges": GatedModel, "terms": ten_terms_by_heads, "paths": path_terms}
_SHOWN = 30  # parts listed by repr


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


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """A circuit: the terms that remain after pruning, returned by `find_circuit`.

    Parameters
    ----------
    of
        Kind of term: "edges", "terms" or "paths".
    kept
        Names of the remaining terms, in model order.
    effects
        (kept,): increase of the loss if that term is removed as well.
    removed
        Names of the removed terms, in order of removal.
    losses
        (removed,): loss after each removal, in nats.
    full_loss, loss
        Loss of the full model and of the circuit.
    """

    of: Of
    kept: tuple[str, ...]
    effects: Array
    removed: tuple[str, ...]
    losses: Array
    full_loss: float
    loss: float

    @property
    def worth(self) -> Array:
        """Deprecated name of `effects`."""
        warnings.warn("Circuit.worth is deprecated; use Circuit.effects.", DeprecationWarning, stacklevel=2)
        return self.effects

    def __repr__(self) -> str:
        total = len(self.kept) + len(self.removed)
        also = (
            " and the softmax remainder" if self.of == "terms" else ""
        )  # which no term stands for, see `find_circuit`
        lines = [
            f"{len(self.kept)} of {total} {self.of}{also}, loss {self.loss:.3f}; with all of them {self.full_loss:.3f}",
            f"  {'':24}loss without it",
        ]
        order = np.argsort(-self.effects, kind="stable")
        lines += [f"  {self.kept[k]:24}{self.loss + self.effects[k]:15.3f}" for k in order[:_SHOWN]]
        return "\n".join(lines + (["  ..."] if len(order) > _SHOWN else []))


@accepts_models
@single_threaded_blas
def find_circuit(
    model: Checkpoint,
    tokens: Array,
    mask: Array,
    *,
    loss_increase: float,
    by: By = "greedy",
    of: Of = "edges",
) -> Circuit:
    """Prune an attention-only model to a circuit that preserves the loss on some tokens.

    Parameters
    ----------
    model
        Attention layers without norms and feed-forward layers, and an unembedding.
    tokens
        (n,) or (batch, n), integers.
    mask
        Same shape, bool: the tokens whose prediction counts in the loss.
    loss_increase
        Largest allowed increase of the mean cross-entropy, in nats.
    by
        "greedy": repeatedly remove the term whose removal raises the loss least, by measurement; at the end no single
        term can be removed. "gradient": try the terms in order of their first-order effect, all computed in one
        backward pass; a term whose removal would exceed the budget stays.
    of
        "edges": from writers (tokens, positions, heads, output biases) to readers (queries, keys and values of a head,
        logits), with patterns recomputed from the remaining edges. "paths": paths through heads with frozen patterns.
        "terms": the ten terms of a two-layer model, Q-, K- and V-composition by pairs of heads; the softmax remainder
        always stays.

    Returns
    -------
    Circuit
        The remaining terms and the loss without each; printed as a table.

    Raises
    ------
    ArgumentError
        If the model is not attention-only or has no unembedding, tokens or mask have wrong shapes, or `loss_increase` <
        0.

    References
    ----------
    A. Conmy et al., "Towards Automated Circuit Discovery for Mechanistic Interpretability" (2023), for edges; A. Syed
    et al., "Attribution Patching Outperforms Automated Circuit Discovery" (2023), for the first-order effects.

    Examples
    --------
    The induction circuit: head 0.3 attends to the previous token by position, and the keys of layer 1 read its output:

    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.data.repeats import repeated_segments
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens, repeated = repeated_segments(1, rng=np.random.default_rng(1))
    >>> found = find_circuit(model, tokens, repeated, loss_increase=2.0, by="gradient")
    >>> [name for name in found.kept if "0.3" in name.split(" -> ")[1]]
    ['tokens -> 0.3 V', 'positions -> 0.3 Q', 'positions -> 0.3 K']
    """
    for name, value, choices in (("by", by, get_args(By)), ("of", of, get_args(Of))):
        if not is_one_of(value, choices):
            raise ArgumentError(
                f"find_circuit: {name} must be {' or '.join(map(repr, choices))}, got {value!r}; choose one."
            )
    if not isinstance(loss_increase, numbers.Real) or not 0 <= loss_increase < np.inf:
        raise ArgumentError(
            f"find_circuit: loss_increase must be a number of nats from 0 on, got {loss_increase!r}; "
            "0.1 keeps the loss within a tenth of a nat."
        )
    gated = _MAKE[of](model, tokens, mask, "find_circuit")
    full_loss = gated.loss(np.ones(len(gated.names)))
    pruned = prune(gated, full_loss + loss_increase, by)
    remaining = np.flatnonzero(pruned.gates)
    loss = gated.loss(pruned.gates)
    return Circuit(
        of=of,
        kept=tuple(gated.names[k] for k in remaining),
        effects=gated.losses_without(pruned.gates, remaining) - loss,
        removed=tuple(gated.names[k] for k in pruned.removed),
        losses=np.array(pruned.losses),
        full_loss=full_loss,
        loss=loss,
    )
