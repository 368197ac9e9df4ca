"""Decomposition of a head's scores into content and learned-position parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import LowRank
from tnlib._typing import Array


@dataclass(frozen=True, eq=False)
class PositionParts:
    """The bilinear form of a head, split for a stream that is content c plus position embedding p.

    With c~ = [c, 1], p_i the position of the query and p_j that of the key:

        score_ij / scale = c~_i content c~_j^T + (c~_i by_key)_j + (by_query c~_j^T)_i + alone_ij

    Every part has rank at most d_head.

    Parameters
    ----------
    content
        (d_model + 1, d_model + 1), content to content: Omega itself.
    by_key
        (d_model + 1, n), query content to key position.
    by_query
        (n, d_model + 1), query position to key content.
    alone
        (n, n), position to position.
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
