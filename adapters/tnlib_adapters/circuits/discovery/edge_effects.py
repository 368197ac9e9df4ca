"""Effects of single edges of a language model: attribution patching, beside the measured effects of ablation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_count, as_flag, as_real, is_list, is_one_of
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.discovery.edge_ablation import Ablation, AblationKind, GatedModel, as_ablation
from tnlib_adapters.circuits.discovery.term_searches import integrated_effects
from tnlib_adapters.result_table import Columns, Table, descending

_DRAWN = 64  # edges of the picture in a notebook


class Recovery(NamedTuple):
    """Precision and recall of a set of edges, and the number of edges that are to be found.

    Examples
    --------
    One of the two given edges is among the two that have an effect of at least 0.4:

    >>> import numpy as np
    >>> values = np.array([2, 1, 0.1])
    >>> effects = EdgeEffects(("a -> b", "a -> c", "b -> c"), *[values] * 3, loss=0.5)
    >>> effects.recovery(["a -> b", "b -> c"], least=0.4)
    Recovery(precision=0.5, recall=0.5, n_edges=2)
    """

    precision: float
    recall: float
    n_edges: int


@dataclass(frozen=True, eq=False, repr=False)
class EdgeEffects(Table):
    """Effects of edges on a loss, returned by `edge_effects`.

    Parameters
    ----------
    names
        Edges, "writer -> reader", in order of the model.
    first_order
        (edges,): first-order estimate of the increase of the loss if the edge is ablated, in nats. Zero for the KL
        divergence, which is smallest in the whole model.
    integrated
        (edges,): the same averaged over five models in which all edges are partly ablated.
    measured
        (edges,): the increase itself; NaN where it was not measured.
    loss
        Loss of the model.
    by_position
        (edges, n): the parts of `integrated` that the reader gets at each position; None if not asked for.

    References
    ----------
    A. Syed et al., "Attribution Patching Outperforms Automated Circuit Discovery" (2023). M. Hanna et al., "Have Faith
    in Faithfulness" (2024), average gradients over a line of embeddings; here it is a line of gates.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.data.repeats import repeated_segments
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens, mask = repeated_segments(1, rng=np.random.default_rng(1))
    >>> found = edge_effects(model, tokens, mask, n_measured=2)
    >>> edge, effect = found.top(1)[0]
    >>> edge, f"{effect:.1f} nats, loss {found.loss:.2f}"
    ('positions -> 0.3 K', '4.6 nats, loss 0.12')
    """

    names: tuple[str, ...]
    first_order: Array
    integrated: Array
    measured: Array
    loss: float
    by_position: Array | None = None

    _SHOWN = 10

    @property
    def errors(self) -> Array:
        """First-order estimate minus measured effect, (edges,); NaN where it was not measured."""
        return self.first_order - self.measured

    def top(self, n: int) -> list[tuple[str, float]]:
        """Return the n edges with the largest effect, measured if known, else integrated, as (name, effect)."""
        effects, order = self.known_effects, self._largest[: as_count("EdgeEffects.top", "n", n, least=0)]
        return [(self.names[k], float(effects[k])) for k in order]

    def recovery(self, kept: Collection[str], least: float) -> Recovery:
        """Return precision and recall of edges with respect to those whose measured effect is at least `least`.

        Raises `ArgumentError` if an edge is unknown or was not measured. Precision of no edges is 0.
        """
        least = as_real("EdgeEffects.recovery", "least", least, "least=0.1")
        names = set(self.names)
        if not is_list(kept) or not all(is_one_of(name, names) for name in kept):
            raise ArgumentError(
                f"EdgeEffects.recovery: kept must be names of edges, got {kept!r:.80}; pass circuit.kept of the same "
                "model and ablation."
            )
        if np.isnan(self.measured).any():
            raise ArgumentError(
                f"EdgeEffects.recovery: all edges must be measured, got {int(np.isnan(self.measured).sum())} that are "
                "not; call edge_effects without n_measured."
            )
        wanted = {name for name, effect in zip(self.names, self.measured, strict=True) if effect >= least}
        common = len(wanted & set(kept))
        return Recovery(common / max(len(set(kept)), 1), common / max(len(wanted), 1), len(wanted))

    @property
    def known_effects(self) -> Array:
        """Effect of every edge, (edges,): measured if known, else integrated."""
        return np.where(np.isnan(self.measured), self.integrated, self.measured)

    @property
    def _largest(self) -> Array:
        """Numbers of the edges, largest effect first."""
        return descending(np.abs(self.known_effects))

    @property
    def _title(self) -> str:
        n_measured = int((~np.isnan(self.measured)).sum())
        return f"{len(self.names)} edges, {n_measured} of them measured; loss {self.loss:.3f}"

    def _columns(self, rows: Any) -> Columns:
        writers, readers = np.array([name.split(" -> ") for name in self.names], dtype=object)[rows].T
        effects = {"first_order": self.first_order, "integrated": self.integrated, "measured": self.measured}
        columns = {"writer": writers, "reader": readers} | {name: effect[rows] for name, effect in effects.items()}
        if self.by_position is not None:
            parts = self.by_position[rows]
            position = np.abs(parts).argmax(axis=1)
            columns |= {"position": position, "at_position": np.take_along_axis(parts, position[:, None], 1)[:, 0]}
        return columns

    def _printed(self) -> Array:
        return self._largest[: self._SHOWN]

    def _notes(self) -> list[str]:
        known = ~np.isnan(self.measured)
        size = np.linalg.norm(self.measured[known])
        if size == 0:
            return []
        errors = (np.linalg.norm((a - self.measured)[known]) / size for a in (self.first_order, self.integrated))
        return ["relative error {:.2f} to first order, {:.2f} integrated".format(*errors)]

    def _picture(self) -> str:
        effects = np.stack([self.first_order, self.integrated, self.measured])  # estimate edge
        label = "effects of the largest edges as columns; to first order, integrated and measured as rows"
        return heat_image(effects[:, self._largest[:_DRAWN]], label, width=320)


@accepts_models
@single_threaded_blas
def edge_effects(
    model: Checkpoint,
    tokens: ArrayLike,
    mask: Array | None = None,
    *,
    ablation: AblationKind | Ablation = "zero",
    n_measured: int | None = None,
    by_position: bool = False,
) -> EdgeEffects:
    """Return the effect of every edge of a language model on its loss, to first order, integrated, and by ablation.

    An edge leads from a writer of the residual stream to a reader, see `find_circuit`. The first-order effects of all
    edges, attribution patching, take one forward and one backward pass, integrated ones five; a measured effect takes
    one forward pass.

    Parameters
    ----------
    model
        A language model with one residual stream.
    tokens
        (n,) or (batch, n), integers, or one or several texts.
    mask
        Same shape, bool: the tokens whose prediction counts in the loss. None: the last one.
    ablation
        "zero", "mean" or "resample", or an `Ablation`, which also chooses the metric and corrupted tokens.
    n_measured
        Number of edges that are measured, those with the largest integrated effects. None: all.
    by_position
        Whether to split integrated effects by the position of the reader. The largest part of every edge is printed.

    Returns
    -------
    EdgeEffects
        Printed as a table of the largest effects.

    Raises
    ------
    ArgumentError
        If the model has no unembedding, or tokens or mask have wrong shapes.
    ModuleNotFoundError
        If torch, which computes the gradients, is not installed.

    References
    ----------
    A. Syed et al., "Attribution Patching Outperforms Automated Circuit Discovery" (2023). M. Hanna et al., "Have Faith
    in Faithfulness" (2024), average gradients over a line of embeddings; here it is a line of gates.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.data.repeats import repeated_segments
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens, repeated = repeated_segments(2, rng=np.random.default_rng(1))
    >>> found = edge_effects(model, tokens, repeated, n_measured=20)
    >>> len(found.names), int((~np.isnan(found.measured)).sum())
    (120, 20)
    >>> sorted(name for name, effect in found.top(3))
    ['positions -> 0.3 K', 'positions -> 0.3 Q', 'tokens -> 0.3 V']
    """
    count = None if n_measured is None else as_count("edge_effects", "n_measured", n_measured, least=0)
    gated = GatedModel(model, tokens, mask, "edge_effects", as_ablation("edge_effects", ablation))
    gates, split = np.ones(len(gated.names)), as_flag("edge_effects", "by_position", by_position)
    loss, first_order = gated.loss(gates), gated.first_order(gates)
    parts = integrated_effects(partial(gated.first_order_between, by_position=split))  # edge, and position if split
    integrated = parts.sum(axis=1) if split else parts
    chosen = np.argsort(-np.abs(integrated), kind="stable")[:count]
    measured = np.full(len(gates), np.nan)
    measured[chosen] = gated.losses_without(gates, chosen) - loss
    return EdgeEffects(gated.names, first_order, integrated, measured, loss, parts if split else None)
