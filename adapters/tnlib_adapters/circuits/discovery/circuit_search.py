"""Which terms of a model matter: the others are taken out for as long as the loss allows."""

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
    """What is left of a model when terms are taken out; made by `find_circuit`.

    Parameters
    ----------
    of
        "edges", "terms" or "paths".
    kept
        Names of what is left, in the order of the model.
    worth
        (kept,): by how much the loss of the circuit rises if that one is taken out as well.
    removed
        Names of what was taken out, in that order.
    losses
        (removed,): the loss after each, in nats.
    full_loss, loss
        Of the whole model and of the circuit.
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
    """Take out of an attention-only model whatever the loss on some tokens can do without.

    Parameters
    ----------
    model
        Attention layers without norms and feed-forward layers, with an unembedding.
    tokens
        (n,) or (batch, n), integers.
    mask
        Same shape, bool: which tokens are to be predicted.
    loss_increase
        By how many nats the mean cross-entropy may rise.
    by
        "greedy": the term whose removal costs least goes first, costs measured; at the end no single one can go.
        "gradient": the term with the smallest effect to first order is tried first, all effects from one pass backward;
        where the loss itself forbids it, it stays.
    of
        "edges": from what writes (tokens, positions, heads, output biases) to what reads (queries, keys and values of a
        head, logits), patterns computed from what is left. "paths": of heads, patterns fixed. "terms": the ten terms of
        a model of two layers, Q-, K- and V-composition by pairs of heads; what softmax leaves over stays.

    Returns
    -------
    Circuit
        What is left and what it is worth; printed as a table.

    Raises
    ------
    ArgumentError
        If the model is another one or has no unembedding, tokens or mask do not fit, or `loss_increase` is negative.

    References
    ----------
    A. Conmy et al., "Towards Automated Circuit Discovery for Mechanistic Interpretability" (2023), for edges; A. Syed
    et al., "Attribution Patching Outperforms Automated Circuit Discovery" (2023), for first order.

    Examples
    --------
    The induction circuit: positions let head 0.3 look one token back, keys of layer 1 read it.

    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.data.repeats import repeated_segments
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens, repeated = repeated_segments(1, rng=np.random.default_rng(1))
    >>> found = find_circuit(model, tokens, repeated, loss_increase=2.0, by="gradient")
    >>> [name for name in found.kept if "0.3" in name.split(" -> ")[1]]
    ['tokens -> 0.3 V', 'positions -> 0.3 Q', 'positions -> 0.3 K']
    """
    for name, value, known in (("by", by, get_args(By)), ("of", of, get_args(Of))):
        if not is_one_of(value, known):
            raise ArgumentError(
                f"find_circuit: {name} must be {' or '.join(map(repr, known))}, got {value!r}; choose one."
            )
    if not isinstance(loss_increase, numbers.Real) or not 0 <= loss_increase < np.inf:
        raise ArgumentError(
            f"find_circuit: loss_increase must be a number of nats from 0 on, got {loss_increase!r}; "
            "0.1 keeps the loss within a tenth of a nat."
        )
    gated = _MAKE[of](model, tokens, mask, "find_circuit")
    full_loss = gated.loss(np.ones(len(gated.names)))
    left = prune(gated, full_loss + loss_increase, by)
    kept = np.flatnonzero(left.gates)
    loss = gated.loss(left.gates)
    return Circuit(
        of=of,
        kept=tuple(gated.names[k] for k in kept),
        worth=gated.losses_without(left.gates, kept) - loss,
        removed=tuple(gated.names[k] for k in left.removed),
        losses=np.array(left.losses),
        full_loss=full_loss,
        loss=loss,
    )
