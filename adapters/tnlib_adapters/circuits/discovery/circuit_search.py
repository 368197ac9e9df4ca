"""Circuit discovery: ablate edges, paths or terms within a loss budget, by greedy search, gradients or ACDC."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_real, check_choice
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.discovery.edge_ablation import Ablation, AblationKind, GatedModel, as_ablation
from tnlib_adapters.circuits.discovery.gated_terms import path_terms, ten_terms_by_heads
from tnlib_adapters.circuits.discovery.target_loss import Metric, metric_name
from tnlib_adapters.circuits.discovery.term_searches import By, Gated, PartOfTerms, Pruned, prune
from tnlib_adapters.result_table import Columns, Table, descending

Of = Literal["edges", "terms", "paths"]
_TERMS: dict[str, Any] = {"terms": ten_terms_by_heads, "paths": path_terms}
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
        (kept,): increase of the loss if that term is removed as well; for "attribution" and "integrated" the estimates
        by which terms were ranked.
    removed
        Names of the removed terms, in order of removal.
    losses
        (removed,): loss after each removal, in nats; NaN where a search did not measure it.
    full_loss, loss
        Loss of the full model and of the circuit.
    metric
        "loss" for cross-entropy, "kl" for the KL divergence from the predictions of the full model, or the function.
    curve
        (points, 2): numbers of terms, ascending, and the loss of the circuits of that size that the search measured,
        larger and smaller than this one.

    References
    ----------
    A. Conmy et al., "Towards Automated Circuit Discovery for Mechanistic Interpretability" (2023), for edges and
    "acdc"; A. Syed et al., "Attribution Patching Outperforms Automated Circuit Discovery" (2023), for "attribution"; M.
    Hanna et al., "Have Faith in Faithfulness" (2024), for "integrated", with gates in place of embeddings.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.data.repeats import repeated_segments
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens, repeated = repeated_segments(1, rng=np.random.default_rng(1))
    >>> found = find_circuit(model, tokens, repeated, loss_increase=2.0, by="attribution")
    >>> len(found.kept) + len(found.removed), found.loss <= found.full_loss + 2
    (120, True)
    """

    of: Of
    kept: tuple[str, ...]
    effects: Array
    removed: tuple[str, ...]
    losses: Array
    full_loss: float
    loss: float
    metric: Metric = "loss"
    curve: Array = field(default_factory=lambda: np.empty((0, 2)))

    _HIDDEN = ("is_kept", "loss")
    _SHOWN = 30

    @property
    def _title(self) -> str:
        total = len(self.kept) + len(self.removed)
        remainder = " and the softmax remainder" if self.of == "terms" else ""  # no term contains it
        value = f"{metric_name(self.metric)} {self.loss:.3f}; with all of them {self.full_loss:.3f}"
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
        return descending(self.effects, self._SHOWN)

    def _notes(self) -> list[str]:
        n = int((self.effects < -5e-4).sum())  # printed as negative
        return [f"{n} kept {self.of} have negative effects: without one of them alone the loss is lower"] if n else []

    def _picture(self) -> str:
        if not self.kept:
            return ""
        effects = self.effects[descending(self.effects, _DRAWN)]
        return heat_image(effects[None], "effects of the remaining terms, largest first", width=320)


@accepts_models
@single_threaded_blas
def find_circuit(
    model: Checkpoint,
    tokens: ArrayLike,
    mask: Array | None = None,
    *,
    loss_increase: float,
    by: By = "greedy",
    of: Of | Circuit = "edges",
    ablation: AblationKind | Ablation = "zero",
) -> Circuit:
    """Prune a language model to a circuit that preserves the loss on some tokens.

    Parameters
    ----------
    model
        A language model with one residual stream; for "terms" and "paths" attention layers without norms and
        feed-forward layers.
    tokens
        (n,) or (batch, n), integers, or one or several texts.
    mask
        Same shape, bool: the tokens whose prediction counts in the loss. None: the last one.
    loss_increase
        Largest allowed increase of the mean cross-entropy, or of the KL divergence, in nats.
    by
        "greedy": repeatedly remove the term whose removal raises the loss least, by measurement; at the end no single
        term can be removed. "acdc": one sweep from the logits to the embedding, which removes terms that cost at most a
        threshold; the largest of the thresholds ``loss_increase / 2**k`` that meets the budget. "attribution": keep the
        terms with the largest first-order effects, from one backward pass, as few as meet the budget. "integrated": the
        same for effects averaged over five models with all gates between 0 and 1. "gradient": try the terms in order of
        their first-order effect; a term whose removal would exceed the budget stays. "greedy", "acdc" and "gradient"
        evaluate the loss without each term: for more than 10,000 evaluations a logged warning states their number.
    of
        "edges": from writers (tokens, positions, heads, output biases, feed-forward layers) to readers (queries, keys
        and values of a head, feed-forward layers, logits), with norms, patterns and feed-forward layers recomputed from
        the remaining edges. "paths": paths through heads with frozen patterns. "terms": the ten terms of a two-layer
        model, Q-, K- and V-composition by pairs of heads; the softmax remainder always stays.
        A circuit: the terms that it keeps, the others stay removed. So "greedy" and "acdc" prune in minutes what a fast
        search with a smaller `loss_increase` leaves of 100,000 edges.
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
        unembedding or, for "terms" and "paths", is not attention-only, tokens or mask have wrong shapes,
        `loss_increase` < 0, or a circuit has terms that the model lacks or exceeds the budget already.
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
    outer, of = (of, of.of) if isinstance(of, Circuit) else (None, of)
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
    limit = full_loss + loss_increase
    pruned = prune(gated, limit, by) if outer is None else _prune_within(outer, gated, limit, by)
    if isinstance(gated, GatedModel):
        pruned = _connected(gated, pruned, limit)
    return _circuit(gated, pruned, of, full_loss, how.metric)


def _prune_within(circuit: Circuit, gated: Gated, limit: float, by: By) -> Pruned:
    """Prune a circuit further."""
    of_name = {name: term for term, name in enumerate(gated.names)}
    unknown = next((name for name in circuit.kept if name not in of_name), None)
    if unknown is not None:
        raise ArgumentError(
            f"find_circuit: of must be a kind of term, or a circuit of this model with the same ablation, got one with "
            f"{unknown!r}, which is no term here; pass the model and the ablation of that circuit."
        )
    part = PartOfTerms(gated, np.array([of_name[name] for name in circuit.kept], int))
    loss = part.loss(np.ones(len(part.names)))
    if loss > limit:
        raise ArgumentError(
            f"find_circuit: of must be a circuit that meets the budget of {limit:.4g}, got one with {loss:.4g}; pass "
            "one found with a smaller loss_increase."
        )
    return part.of_all(prune(part, limit, by))


def _circuit(gated: Gated, pruned: Pruned, of: Of, full_loss: float, metric: Metric) -> Circuit:
    """Return a circuit, with the effects of its terms measured unless they were estimated."""
    n, kept, loss = len(gated.names), np.flatnonzero(pruned.gates), gated.loss(pruned.gates)
    effects = gated.losses_without(pruned.gates, kept) - loss if pruned.effects is None else pruned.effects[kept]
    measured = pruned.losses | {n: full_loss, len(kept): loss}
    return Circuit(
        of=of,
        kept=tuple(gated.names[k] for k in kept),
        effects=effects,
        removed=tuple(gated.names[k] for k in pruned.removed),
        losses=np.array([measured.get(n - k - 1, np.nan) for k in range(len(pruned.removed))]),
        full_loss=full_loss,
        loss=loss,
        metric=metric,
        curve=np.array(sorted(measured.items()), float),
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
    return replace(pruned, gates=gates, removed=[*pruned.removed, *dropped])


def _gated(model: Checkpoint, tokens: Any, mask: Array | None, of: Of, ablation: Ablation) -> Gated:
    if of == "edges":
        return GatedModel(model, tokens, mask, "find_circuit", ablation)
    if ablation.kind != "zero" or ablation.metric != "loss":
        raise ArgumentError(
            f"find_circuit: ablation must be 'zero', with the metric 'loss', for of={of!r}, got {ablation}; choose "
            "of='edges'."
        )
    gated: Gated = _TERMS[of](model, tokens, mask, "find_circuit")
    return gated
