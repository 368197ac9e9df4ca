"""What learned positions have to do with a head's scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import LowRank
from tnlib._typing import Array


@dataclass(frozen=True, eq=False)
class PositionParts:
    """A head's form, split by what stands in the stream: content c and the position p that was added to it.

    With c~ = [c, 1], p_i the position of the query and p_j that of the key,

        score_ij / scale = c~_i content c~_j^T + (c~_i by_key)_j + (by_query c~_j^T)_i + alone_ij

    and every part has rank at most d_head.

    Parameters
    ----------
    content
        (d_model + 1, d_model + 1), Omega itself.
    by_key
        (d_model + 1, n), what content asks of the position of a key.
    by_query
        (n, d_model + 1), what the position of a query asks of content.
    alone
        (n, n), what positions ask of positions.
    """

    content: LowRank
    by_key: LowRank
    by_query: LowRank
    alone: LowRank


def position_parts(form: LowRank, positions: Array) -> PositionParts:
    """Split the form of a head by positions (n, d_model), which the stream holds on top of the content."""
    padded = np.hstack([positions, np.zeros_like(positions[:, :1])])  # the constant coordinate belongs to the content
    of_query = padded @ form.left  # n [d~] dh
    of_key = form.right @ padded.T  # dh [d~] n
    return PositionParts(
        content=form,
        by_key=LowRank(form.left, of_key),
        by_query=LowRank(of_query, form.right),
        alone=LowRank(of_query, of_key),
    )
