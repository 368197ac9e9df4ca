r"""Faithfulness of circuits of growing size, as the Mechanistic Interpretability Benchmark (MIB) measures it.

Edges are ranked by the moduli of their scores. With m(k) the metric of the k first edges, the others ablated, and N the
number of all edges,

    f(k) = (m(k) - m(0)) / (m(N) - m(0)),

measured at 0.1, 0.2, 0.5, ..., 50 and 100 % of the edges. CPR is the area under f as a function of k / N, CMD the area
of |1 - f|, both by trapezoids. Where the edges of the circuit are known, AUROC is the probability that one of them
has a higher score than another edge, 1/2 by chance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import is_list
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.discovery.circuit_search import Circuit
from tnlib_adapters.circuits.discovery.edge_ablation import Ablation, AblationKind, GatedModel, as_ablation
from tnlib_adapters.circuits.discovery.edge_effects import EdgeEffects
from tnlib_adapters.circuits.discovery.term_searches import FRACTIONS, of_last
from tnlib_adapters.result_table import Columns, Table

Scores = EdgeEffects | Circuit | Mapping[str, float]


@dataclass(frozen=True, eq=False, repr=False)
class Faithfulness(Table):
    """Faithfulness of circuits by size, returned by `circuit_faithfulness`.

    Parameters
    ----------
    sizes
        (points,), numbers of edges.
    losses
        (points,), metric of these circuits.
    empty_loss
        Metric without any edge.
    auroc
        Area under the receiver operating characteristic of the known edges; NaN if they are not given.

    References
    ----------
    A. Mueller et al., "MIB: A Mechanistic Interpretability Benchmark" (2025).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.circuits import edge_effects
    >>> from tnlib_adapters.data.repeats import repeated_segments
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> text = repeated_segments(1, rng=np.random.default_rng(1))
    >>> found = circuit_faithfulness(model, *text, edge_effects(model, *text, n_measured=0))
    >>> found.sizes[[5, 6, -1]], found.values[[5, 6, -1]].round(1), f"CPR {found.cpr:.2f}"
    (array([  6,  12, 120]), array([0. , 0.8, 1. ]), 'CPR 0.88')
    """

    sizes: Array
    losses: Array
    empty_loss: float
    auroc: float

    @property
    def values(self) -> Array:
        """(points,): 1 for the metric of the model, 0 for that without any edge."""
        return np.asarray((self.losses - self.empty_loss) / (self.losses[-1] - self.empty_loss))

    @property
    def cpr(self) -> float:
        """Area under the faithfulness as a function of the fraction of edges (circuit performance ratio)."""
        return _area(self.values)

    @property
    def cmd(self) -> float:
        """Area of the distance of the faithfulness from 1 (circuit-model distance); 0 is best."""
        return _area(np.abs(1 - self.values))

    @property
    def _title(self) -> str:
        auroc = "" if math.isnan(self.auroc) else f", AUROC {self.auroc:.3f}"
        return f"Faithfulness of circuits of {self.sizes[-1]} edges: CPR {self.cpr:.3f}, CMD {self.cmd:.3f}{auroc}"

    def _columns(self, rows: Any) -> Columns:
        columns = {"fraction": np.array(FRACTIONS), "edges": self.sizes, "metric": self.losses}
        return {name: values[rows] for name, values in (columns | {"faithfulness": self.values}).items()}


def _area(values: Array) -> float:
    return float(((values[1:] + values[:-1]) / 2 * np.diff(FRACTIONS)).sum())


@accepts_models
@single_threaded_blas
def circuit_faithfulness(
    model: Checkpoint,
    tokens: ArrayLike,
    mask: Array | None,
    scores: Scores,
    *,
    ablation: AblationKind | Ablation = "zero",
    true_edges: Collection[str] | None = None,
) -> Faithfulness:
    """Return the faithfulness of the circuits that scores of edges rank, with CPR, CMD and AUROC of MIB.

    Parameters
    ----------
    model
        A language model with one residual stream.
    tokens
        (n,) or (batch, n), integers, or one or several texts.
    mask
        Same shape, bool: the tokens whose prediction counts in the metric. None: the last one.
    scores
        Scores of edges: what `edge_effects` returned; a circuit of edges, whose last removed edge ranks first among the
        removed ones; or a number for the name of each edge, 0 for edges without one.
    ablation
        As in `edge_effects`. MIB measures logit differences with "resample" and corrupted tokens.
    true_edges
        Names of the edges of a known circuit, for AUROC.

    Raises
    ------
    ArgumentError
        If an edge is unknown or was given no score that is finite, all or no edges are in the known circuit, or the
        model without any edge has the metric of the whole model.

    References
    ----------
    A. Mueller et al., "MIB: A Mechanistic Interpretability Benchmark" (2025).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.circuits import edge_effects
    >>> from tnlib_adapters.data.repeats import repeated_segments
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> text = repeated_segments(2, rng=np.random.default_rng(1))
    >>> found = circuit_faithfulness(model, *text, edge_effects(model, *text, n_measured=0))
    >>> round(found.cmd, 1), float(found.values[-1])
    (0.1, 1.0)
    """
    function = "circuit_faithfulness"
    by_name = edge_scores(function, scores)
    gated = GatedModel(model, tokens, mask, function, as_ablation(function, ablation))
    check_edges(function, "scores", by_name, gated.names)
    values = np.array([abs(by_name.get(name, 0.0)) for name in gated.names])
    auroc = np.nan if true_edges is None else _auroc(function, values, gated.names, true_edges)
    order = np.argsort(values, kind="stable")
    empty_loss = gated.loss(np.zeros(len(order)))
    sizes = [math.ceil(fraction * len(order)) for fraction in FRACTIONS]
    losses = np.array([gated.loss(of_last(order, size)) for size in sizes])
    if losses[-1] == empty_loss:
        raise ArgumentError(
            f"{function}: the metric without any edge must differ from that of the model, got {empty_loss:.4g} for "
            "both; choose another metric or other corrupted tokens."
        )
    return Faithfulness(np.array(sizes), losses, empty_loss, auroc)


def edge_scores(function: str, scores: Any) -> dict[str, float]:
    """Return scores of edges by name: effects, ranks in a circuit divided by their number, or given ones."""
    if isinstance(scores, EdgeEffects):
        return dict(zip(scores.names, scores.known_effects.tolist(), strict=True))
    if isinstance(scores, Circuit) and scores.of == "edges":
        kept = [scores.kept[k] for k in np.argsort(np.abs(scores.effects), kind="stable")]
        ranked = [*scores.removed, *kept]
        return {name: (k + 1) / len(ranked) for k, name in enumerate(ranked)}
    if not isinstance(scores, Mapping):
        raise ArgumentTypeError(
            f"{function}: scores must be EdgeEffects, a Circuit of edges or numbers by edge, got "
            f"{type(scores).__name__}; pass what edge_effects returned."
        )
    values = {name: float(value) for name, value in scores.items()}
    if not all(map(math.isfinite, values.values())):
        raise ArgumentError(f"{function}: scores must be finite, got NaN or inf; leave out edges without a score.")
    return values


def check_edges(function: str, parameter: str, edges: Collection[str], names: Collection[str]) -> None:
    """Raise `ArgumentError` if an edge is not one of the names."""
    unknown = set(edges) - set(names)
    if unknown:
        raise ArgumentError(
            f"{function}: {parameter} must name edges such as {next(iter(names))!r}, got {min(unknown)!r}; see the "
            "names of edge_effects for the same model and ablation."
        )


def _auroc(function: str, values: Array, names: Collection[str], true_edges: Collection[str]) -> float:
    """Return the probability that a true edge has a higher score than another one, ties counted half."""
    from scipy.stats import rankdata

    if not is_list(true_edges):
        raise ArgumentTypeError(f"{function}: true_edges must be names of edges, got {type(true_edges).__name__}.")
    check_edges(function, "true_edges", true_edges, names)
    true = np.array([name in set(true_edges) for name in names])
    n_true, n_other = int(true.sum()), int((~true).sum())
    if not n_true or not n_other:
        raise ArgumentError(f"{function}: true_edges must be some of {len(names)} edges, got {n_true}; pass a circuit.")
    return float((rankdata(values)[true].sum() - n_true * (n_true + 1) / 2) / (n_true * n_other))
