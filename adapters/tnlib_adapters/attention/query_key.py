"""Bilinear form of a head's scores in factored form: at one distance or at many, and split by learned positions.

`q` and `k` are [W_Q; b_Q] and [W_K; b_K] of one head, (d_model + 1, d_head) each: x~ q is its query, x~ k its key.
The query is at the distance, the key at 0. ALiBi and relative biases add an offset to a score, stated before the
score scale: one more rank, the constant coordinate with itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import LowRank, Tucker
from tnlib._typing import Array
from tnlib_adapters.attention.rotary import Rotary


def form(
    q: Array, k: Array, distance: float, *, rotary: Rotary | None, offset: float | None, plane: int | None
) -> LowRank:
    """Return the form at one distance, for rotary embeddings (or the part of one plane), an offset or neither."""
    if rotary is not None:
        left, right = rotary.rotate(q, distance), rotary.rotate(k, 0)  # rotation by 0 applies `factor`
        columns = slice(None) if plane is None else _columns(rotary, plane)
        return LowRank(left[:, columns], right[:, columns].T)
    if offset is None:
        return LowRank(q, k.T)
    unit = _constant_coordinate(q)
    return LowRank(np.hstack([q, offset * unit]), np.hstack([k, unit]).T)


def forms(
    q: Array, k: Array, distances: Array, *, rotary: Rotary | None, offsets: Array | None, plane: int | None
) -> Tucker:
    """Return the forms at many distances as one array (distances, d_model + 1, d_model + 1)."""
    if rotary is not None:
        return _stack_rotated(q, k, rotary, distances, plane)
    n = q.shape[1]
    if offsets is None:
        return Tucker(np.eye(n, dtype=q.dtype)[None], (np.ones((len(distances), 1), q.dtype), q, k))
    unit, core = _constant_coordinate(q), np.zeros((2, n + 1, n + 1), q.dtype)
    core[0, :n, :n] = np.eye(n)
    core[1, n, n] = 1
    lines = np.stack([np.ones(len(offsets)), offsets], axis=1)
    return Tucker(core, (lines.astype(q.dtype), np.hstack([q, unit]), np.hstack([k, unit])))


def _stack_rotated(q: Array, k: Array, rotary: Rotary, distances: Array, plane: int | None) -> Tucker:
    """Return the forms at many distances: cosines and sines of the distance, queries and keys, and a sparse core."""
    waves, core = rotary.waves(distances), rotary.core(q.shape[1], q.dtype)
    if plane is not None:
        n, columns = len(rotary.frequencies), _columns(rotary, plane)
        waves, core = waves[:, [plane, n + plane]], core[np.ix_([plane, n + plane], columns, columns)]
        q, k = q[:, columns], k[:, columns]
    elif len(core) > waves.shape[1]:  # some columns are not rotated
        waves = np.hstack([waves, np.ones((len(waves), 1))])
    return Tucker(core, (waves.astype(q.dtype), q, k))


def _constant_coordinate(q: Array) -> Array:
    """Return the unit vector (d_model + 1, 1) of the constant coordinate."""
    unit = np.zeros((len(q), 1), q.dtype)
    unit[-1] = 1
    return unit


def _columns(rotary: Rotary, plane: int) -> list[int]:
    first, second = rotary.planes
    return [int(first[plane]), int(second[plane])]


@dataclass(frozen=True, eq=False)
class PositionParts:
    r"""The bilinear form of a head, split for a stream that is content c plus position embedding p.

    With :math:`\tilde c = [c, 1]`, i the position of the query and j that of the key, a score is the scale times

    .. math:: \tilde c{}_i \Omega \tilde c{}_j^T + (\tilde c{}_i K)_j + (Q \tilde c{}_j^T)_i + P_{ij}

    and every part has rank at most d_head.

    Parameters
    ----------
    content
        (d_model + 1, d_model + 1), content to content: :math:`\Omega` itself.
    by_key
        (d_model + 1, n), query content to key position: K.
    by_query
        (n, d_model + 1), query position to key content: Q.
    alone
        (n, n), position to position: P.

    Examples
    --------
    A previous-token head: by position alone, three queries prefer the key before them.

    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> parts = model.attention(0).qk_positions(3, model.positions())
    >>> [int(parts.alone.full()[i, : i + 1].argmax()) for i in (10, 20, 30)]
    [9, 19, 29]
    """

    content: LowRank
    by_key: LowRank
    by_query: LowRank
    alone: LowRank


def position_parts(form: LowRank, positions: Array) -> PositionParts:
    """Return the parts of the form of a head for position embeddings (n, d_model)."""
    padded = np.hstack([positions, np.zeros_like(positions[:, :1])])  # the constant coordinate is part of the content
    of_query = padded @ form.left  # n [d~] dh
    of_key = form.right @ padded.T  # dh [d~] n
    return PositionParts(
        content=form,
        by_key=LowRank(form.left, of_key),
        by_query=LowRank(of_query, form.right),
        alone=LowRank(of_query, of_key),
    )
