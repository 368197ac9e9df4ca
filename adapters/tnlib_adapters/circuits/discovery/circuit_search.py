"""Circuit discovery: ablate edges, paths or terms of an attention-only model within a loss budget."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import is_one_of
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.discovery.edge_gates import GatedModel
from tnlib_adapters.circuits.discovery.greedy_pruning import By, prune
from tnlib_adapters.circuits.discovery.stream_terms import path_terms, ten_terms_by_heads

Of = Literal["edges", "terms", "paths"]
_MAKE: dict[str, Any] = {"edges": GatedModel, "terms": ten_terms_by_heads, "paths": path_terms}


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """A circuit: the terms that remain after pruning, returned by `find_circuit`.

    Parameters
    ----------
    of
        Kind of term: "edges", "terms" or "paths".
    kept
        Names of the remaining terms, in model order.
    worth
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
    worth: Array
    removed: tuple[str, ...]
    losses: Array
    full_loss: float
    loss: float

    def __repr__(self) -> str:
        total = len(self.kept) + len(self.removed)
        lines = [
            f"{len(self.kept)} of {total} {self.of}, loss {self.loss:.3f}; with all of them {self.full_loss:.3f}",
            f"  {'':24}loss without it",
        ]
        order = np.argsort(-self.worth, kind="stable")
        lines += [f"  {self.kept[k]:24}{self.loss + self.worth[k]:15.3f}" for k in order[:_SHOWN]]
        return "\n".join(lines + (["  ..."] if len(order) > _SHOWN else []))


_SHOWN = 30


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
        worth=gated.losses_without(pruned.gates, remaining) - loss,
        removed=tuple(gated.names[k] for k in pruned.removed),
        losses=np.array(pruned.losses),
        full_loss=full_loss,
        loss=loss,
    )
