"""Circuit discovery: ablate edges, paths or terms within a loss budget, by greedy search, gradients or ACDC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from tnlib import ArgumentError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_real, check_choice
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.discovery.edge_ablation import Ablation, AblationKind, GatedModel, Metric, as_ablation
from tnlib_adapters.circuits.discovery.gated_terms import path_terms, ten_terms_by_heads
from tnlib_adapters.result_table import Columns, Table, descending

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


Of = Literal["edges", "terms", "paths"]
_TERMS: dict[str, Any] = {"terms": ten_terms_by_heads, "paths": path_terms}
_METRICS: dict[Metric, str] = {"loss": "loss", "kl": "KL divergence"}
_SHOWN = 30  # terms listed by repr
_DRAWN = 64  # terms of the picture in a notebook


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(Table):
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
        (removed,): loss after each removal, in nats; NaN where a search did not measure it.
    full_loss, loss
        Loss of the full model and of the circuit.
    metric
        "loss" for cross-entropy, "kl" for the KL divergence from the predictions of the full model.
    """

    of: Of
    kept: tuple[str, ...]
    effects: Array
    removed: tuple[str, ...]
    losses: Array
    full_loss: float
    loss: float
    metric: Metric = "loss"

    _HIDDEN = ("is_kept", "loss")

    @property
    def _title(self) -> str:
        total = len(self.kept) + len(self.removed)
        remainder = " and the softmax remainder" if self.of == "terms" else ""  # no term contains it
        value = f"{_METRICS[self.metric]} {self.loss:.3f}; with all of them {self.full_loss:.3f}"
        return f"{len(self.kept)} of {total} {self.of}{remainder}, {value}"

    def _columns(self, rows: Any) -> Columns:
        n_kept, n_removed = len(self.kept), len(self.removed)
        return {
            "term": np.array([*self.kept, *self.removed], dtype=object)[rows],
            "is_kept": (np.arange(n_kept + n_removed) < n_kept)[rows],
            "effect": np.append(self.effects, np.full(n_removed, np.nan))[rows],
            "loss": np.append(np.full(n_kept, np.nan), self.losses)[rows],
        }

    def _printed(self) -> Array:
        return descending(self.effects, _SHOWN)

    def _picture(self) -> str:
        if not self.kept:
            return ""
        effects = self.effects[descending(self.effects, _DRAWN)]
        return heat_image(effects[None], "effects of the remaining terms, largest first", width=320)


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
    ablation: AblationKind | Ablation = "zero",
) -> Circuit:
    """Prune a language model to a circuit that preserves the loss on some tokens.

    Parameters
    ----------
    model
        A language model with one residual stream; for "terms" and "paths" attention layers without norms and
        feed-forward layers.
    tokens
        (n,) or (batch, n), integers.
    mask
        Same shape, bool: the tokens whose prediction counts in the loss.
    loss_increase
        Largest allowed increase of the mean cross-entropy, or of the KL divergence, in nats.
    by
        "greedy": repeatedly remove the term whose removal raises the loss least, by measurement; at the end no single
        term can be removed. "acdc": one sweep from the logits to the embedding, which removes terms that cost at most a
        threshold; the largest of the thresholds loss_increase / 2^k that meets the budget. "attribution": keep the
        terms with the largest first-order effects, from one backward pass, as few as meet the budget. "integrated": the
        same for effects averaged over five models with all gates between 0 and 1. "gradient": try the terms in order of
        their first-order effect; a term whose removal would exceed the budget stays.
    of
        "edges": from writers (tokens, positions, heads, output biases, feed-forward layers) to readers (queries, keys
        and values of a head, feed-forward layers, logits), with norms, patterns and feed-forward layers recomputed from
        the remaining edges. "paths": paths through heads with frozen patterns. "terms": the ten terms of a two-layer
        model, Q-, K- and V-composition by pairs of heads; the softmax remainder always stays.
    ablation
        What replaces an ablated edge: "zero", "mean" or "resample", or an `Ablation`, which also chooses the metric and
        corrupted tokens. Constants, such as biases, are edges for "zero" only.

    Returns
    -------
    Circuit
        The remaining terms and the loss without each; printed as a table. From every edge a path leads to the logits.
        Edges that no path from tokens, positions or a bias reaches are removed too if the loss allows it: their writers
        read replaced values alone.

    Raises
    ------
    ArgumentError
        If `by` is "attribution" or "gradient" for the KL divergence, which has no first-order effects, the model has no
        unembedding or, for "terms" and "paths", is not attention-only, tokens or mask have wrong shapes, or
        `loss_increase` < 0.
    ModuleNotFoundError
        If `by` is "attribution", "integrated" or "gradient", which need gradients, and torch is not installed.

    References
    ----------
    A. Conmy et al., "Towards Automated Circuit Discovery for Mechanistic Interpretability" (2023), for edges and
    "acdc"; A. Syed et al., "Attribution Patching Outperforms Automated Circuit Discovery" (2023), for "attribution"; M.
    Hanna et al., "Have Faith in Faithfulness" (2024), for "integrated", with gates in place of embeddings.

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
    check_choice("find_circuit", "by", by, get_args(By))
    check_choice("find_circuit", "of", of, get_args(Of))
    if not 0 <= as_real("find_circuit", "loss_increase", loss_increase, "loss_increase=0.1") < np.inf:
        raise ArgumentError(
            f"find_circuit: loss_increase must be a number of nats from 0 on, got {loss_increase!r}; "
            "0.1 keeps the loss within a tenth of a nat."
        )
    how = as_ablation("find_circuit", ablation)
    if by in ("attribution", "gradient") and how.metric == "kl":
        raise ArgumentError(
            f"find_circuit: by must not be {by!r} for the metric 'kl', whose derivative is zero in the whole model, "
            "got both; choose by='integrated'."
        )
    gated = _gated(model, tokens, mask, of, how)
    full_loss = gated.loss(np.ones(len(gated.names)))
    pruned = prune(gated, full_loss + loss_increase, by)
    if isinstance(gated, GatedModel):
        pruned = _connected(gated, pruned, full_loss + loss_increase)
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
        metric=how.metric,
    )


def _connected(model: GatedModel, pruned: Pruned, limit: float) -> Pruned:
    """Return a circuit without the edges that no path connects to tokens and logits, if it still meets the limit.

    Without the ones that reach no logits the loss is the same.
    """
    for from_sources in (True, False):
        gates = model.connected(pruned.gates, from_sources=from_sources)
        if not from_sources or model.loss(gates) <= limit:
            break
    dropped = np.flatnonzero(pruned.gates.astype(bool) & ~gates.astype(bool)).tolist()
    return Pruned(gates, [*pruned.removed, *dropped], [*pruned.losses, *[np.nan] * len(dropped)])


def _gated(model: Checkpoint, tokens: Array, mask: Array, of: Of, ablation: Ablation) -> Gated:
    if of == "edges":
        return GatedModel(model, tokens, mask, "find_circuit", ablation)
    if ablation.kind != "zero" or ablation.metric != "loss":
        raise ArgumentError(
            f"find_circuit: ablation must be 'zero', with the metric 'loss', for of={of!r}, got {ablation}; choose "
            "of='edges'."
        )
    gated: Gated = _TERMS[of](model, tokens, mask, "find_circuit")
    return gated
