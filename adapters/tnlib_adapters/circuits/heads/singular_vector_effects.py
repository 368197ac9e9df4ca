r"""Ablation of single singular directions of a head.

With OV = sum_k s_k u_k v_k^T in homogeneous coordinates, the head without direction k has

    OV - s_k u_k v_k^T  =  (I - u_k u_k^T) W_V W_O

so the values do not read u_k: only W_V changes. The same holds for QK with W_Q, and for W_Q or W_K alone. The heads
without one direction each form one attention layer, and its outputs run through the later layers as a batch.

Rotary embeddings rotate between W_Q and W_K, so that QK has other singular vectors at every distance. The directions of
W_Q and of W_K, before the rotation, are the same at all distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, LowRank
from tnlib._typing import Array
from tnlib._validate import check_choice
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.discovery.edge_ablation import Ablation
from tnlib_adapters.circuits.discovery.gated_layers import SIDES, GatedHeads
from tnlib_adapters.circuits.discovery.target_loss import Metric, metric_name, targets_of
from tnlib_adapters.circuits.heads.singular_vectors import SingularVectors, singular_vectors
from tnlib_adapters.reference.model import attention_output
from tnlib_adapters.reference.weights import ResidualBlock, Weights, as_weights, named_blocks
from tnlib_adapters.result_table import Columns, Table, descending

Operator = Literal["OV", "QK", "Q", "K"]
_PROJECTION = {"OV": "V", "QK": "Q", "Q": "Q", "K": "K"}  # the one that does not read a masked direction
_SEQUENCES = 64  # that run at once


@dataclass(frozen=True, eq=False, repr=False)
class SingularVectorEffects(Table):
    """Effects of single singular directions of a head on a metric, returned by `singular_vector_effects`.

    Parameters
    ----------
    name
        Operator and head, "OV of head 23.0".
    vectors
        Singular value decomposition of the operator.
    effects
        (groups,): the metric without a direction, less the metric of the model; by group of `vectors`, because equal
        singular values define a subspace, which is masked as a whole.
    unmasked
        Metric of the model.
    metric
        As in `Ablation`.

    References
    ----------
    A. Ahmad, A. Joshi, A. Modi, "Beyond Components: Singular Vector-Based Interpretability of Transformer Circuits"
    (2025).

    Examples
    --------
    Without one of 4 of its 8 directions, head 0.0 of this model loses the answer:

    >>> import tnlib_adapters
    >>> from tnlib_adapters.data.coded_letters import coded_letters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("known_circuit"))
    >>> found = singular_vector_effects(model, *coded_letters(16, rng=0), 0, 0)
    >>> f"{found.unmasked:.2f}", int((found.effects > 1).sum()), len(found.effects)
    ('0.00', 4, 8)
    """

    name: str
    vectors: SingularVectors
    effects: Array
    unmasked: float
    metric: Metric

    _SHOWN = 8

    @property
    def _title(self) -> str:
        return f"Singular directions of {self.name}; {metric_name(self.metric)} {self.unmasked:.3f}"

    def _columns(self, rows: Any) -> Columns:
        at = descending(np.abs(self.effects))[rows]
        groups = [self.vectors.groups[k] for k in at]
        return {
            "direction": [g.start if g.stop == g.start + 1 else f"{g.start} to {g.stop - 1}" for g in groups],
            "singular_value": [float(self.vectors.values[g.start]) for g in groups],
            "effect": self.effects[at],
        }

    def _notes(self) -> list[str]:
        return [f"effects of {len(self.effects)} directions sum to {self.effects.sum():.3f}"]


@accepts_models
@single_threaded_blas
def singular_vector_effects(
    model: Checkpoint | Weights,
    tokens: ArrayLike,
    mask: Array | None,
    layer: int,
    head: int,
    *,
    operator: Operator = "OV",
    metric: Metric = "loss",
) -> SingularVectorEffects:
    """Return the change of a metric if one head does not use one of its singular directions, for all directions.

    Parameters
    ----------
    model
        A language model with one residual stream. Directions are those of the weights as they are; `fold` includes the
        weights of norms.
    tokens
        (n,) or (batch, n), integers, or one or several texts.
    mask
        Same shape, bool: the tokens whose prediction counts in the metric. None: the last one.
    layer, head
        Indices, from 0.
    operator
        "OV" or "QK", biases included, as `Attention.ov` and `Attention.qk`. "Q" or "K": W_Q or W_K alone.
    metric
        As in `Ablation`: "loss", "kl", `LogitDifference`, or any function of logits and targets.

    Returns
    -------
    SingularVectorEffects
        Printed with the largest effects first. A positive effect of a loss: the direction lowers it.

    Raises
    ------
    ArgumentError
        If there is no such head, tokens or mask have wrong shapes, or QK has no singular vectors that hold for all
        distances and positions (rotary embeddings, normalised queries and keys).

    References
    ----------
    A. Ahmad, A. Joshi, A. Modi, "Beyond Components: Singular Vector-Based Interpretability of Transformer Circuits"
    (2025).

    Examples
    --------
    In a model of which the circuit is known, 4 of 8 directions of head 0.0 carry which of 16 letters it reads:

    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.data.coded_letters import coded_letters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("known_circuit"))
    >>> tokens, answers = coded_letters(16, rng=0)
    >>> singular_vector_effects(model, tokens, answers, 0, 0).effects.round(2)
    array([1.53, 1.22, 1.18, 1.31, 0.  , 0.  , 0.  , 0.  ])
    """
    function = "singular_vector_effects"
    check_choice(function, "operator", operator, get_args(Operator))
    Ablation(metric=metric)  # checks its name
    weights = as_weights(function, model)
    targets = targets_of(weights, tokens, mask, function, metric)
    layer = as_index(function, "layer", layer, weights.n_attention_layers)
    stream = weights.embedding(targets.tokens)  # b n d
    blocks = named_blocks(weights.blocks)
    for block, names in blocks:
        if str(layer) in names:
            break
        stream = block.run(stream, attention_output)
    later = [block, *(following for following, _ in blocks)]
    branch = block.branches[names.index(str(layer))]
    attention: Any = branch.layer
    head = as_index(function, "head", head, attention.n_heads)
    of_head = attention.of_heads([head])
    vectors = singular_vectors(_operator(function, of_head, operator))
    reads = np.broadcast_to(stream, (len(SIDES), 1, *stream.shape))

    def outputs(layer: Attention) -> Array:
        return GatedHeads(layer, branch.before, None).outputs(reads)  # head b n d

    output = outputs(of_head)
    final = _final_streams(later, attention, stream, np.zeros_like(output))[0]
    targets = targets.compared_with(final) if metric == "kl" else targets
    losses, per_run = [], max(1, _SEQUENCES // len(stream))
    for k in range(0, len(vectors), per_run):
        sets = [vectors.left[:, group] for group in vectors.groups[k : k + per_run]]
        changes = outputs(_masked(of_head, _PROJECTION[operator], sets)) - output
        losses += [targets.loss(x) for x in _final_streams(later, attention, stream, changes)]
    unmasked = targets.loss(final)
    name = f"{operator} of head {layer}.{head}"
    return SingularVectorEffects(name, vectors, np.array(losses) - unmasked, unmasked, metric)


def _final_streams(blocks: Sequence[ResidualBlock], layer: Attention, x: Array, changes: Array) -> Array:
    """Return the final streams (k, b, n, d) from the stream x before some blocks, for changes of the output of a layer.

    `changes` are of shape (k, b, n, d).
    """
    added = changes.reshape(-1, *x.shape[1:])
    x = np.tile(x, (len(changes), 1, 1))  # (k b) n d
    for block in blocks:
        x = block.run(x, lambda other, read: attention_output(other, read) + (added if other is layer else 0))
    return x.reshape(changes.shape)


def _operator(function: str, layer: Attention, operator: Operator) -> LowRank:
    """Return the operator of a layer of one head, (d_model + 1, ...), as it acts on the input of the layer."""
    if operator == "QK" and (layer.rotary is not None or not layer.is_bilinear):
        why = "normalised queries and keys" if layer.rotary is None else "rotary embeddings, which rotate by distance"
        raise ArgumentError(
            f"{function}: operator must be 'OV', 'Q' or 'K' for this model, got 'QK', which is no one operator with "
            f"{why}; choose 'Q' or 'K'."
        )
    identity = np.eye(layer.d_head, dtype=layer.W_Q.dtype)
    right = {"OV": layer.W_O[0], "QK": layer.with_bias("K", 0).T}.get(operator, identity)
    return LowRank(layer.with_bias(_PROJECTION[operator], 0), right)


def _masked(layer: Attention, projection: str, sets: list[Array]) -> Attention:
    """Return a layer of one head, repeated: `projection` does not read a set of orthonormal columns (d~, k) each."""
    weight = layer.with_bias(projection, 0)  # d~ dh
    masked = np.stack([weight - u @ (u.T @ weight) for u in sets])
    changed: Any = {f"W_{projection}": masked[:, :-1], f"b_{projection}": masked[:, -1]}
    return replace(layer.of_heads([0] * len(sets)), **changed)
