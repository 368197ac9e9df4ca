"""Circuit discovery: ablate edges, paths or terms of a language model within a loss budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from tnlib import ArgumentError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_real, check_choice
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.discovery.ablation import Ablation, AblationKind, Metric, as_ablation
from tnlib_adapters.circuits.discovery.gated_model import GatedModel
from tnlib_adapters.circuits.discovery.gated_terms import path_terms, ten_terms_by_heads
from tnlib_adapters.circuits.discovery.pruning import By, Gated, prune
from tnlib_adapters.result_table import Columns, Table, descending

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
        The remaining terms and the loss without each; printed as a table.

    Raises
    ------
    ArgumentError
        If `by` is "attribution" or "gradient" for the KL divergence, which has no first-order effects, the model has no
        unembedding or, for "terms" and "paths", is not attention-only, tokens or mask have wrong shapes, or
        `loss_increase` < 0.

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
