"""Singular vectors in token space: the tokens with extreme coordinates along a direction or in a span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.circuits.heads.singular_features import Features
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary
from tnlib_adapters.reference.layers import Norm

Tokens = tuple[tuple[int, float], ...]  # token number, coordinate along the direction


@dataclass(frozen=True)
class Side:
    """One side of a feature in tokens, sorted by coordinate.

    Parameters
    ----------
    positive, negative
        Tokens with the largest and the smallest coordinate along the direction. For a span, whose basis is arbitrary,
        `positive` holds the tokens with the longest projection and `negative` is empty.
    constant
        Share of the squared length on the constant coordinate (biases); 0 on an output side.
    by_position
        Share of learned positions in the variance of the coordinates over tokens and positions. Near 1 the direction
        encodes position, and its tokens mean little. None on an output side, and without learned positions.
    """

    positive: Tokens
    negative: Tokens
    constant: float
    by_position: float | None


@dataclass(frozen=True, eq=False, repr=False)
class TokenFeature:
    """A pair of singular directions, or of spans, in tokens.

    Parameters
    ----------
    number
        Index, or range of indices, of the singular values.
    value
        The singular value; for a span the largest.
    left, right
        Query and key side, or input and output side. `left.positive` belongs to `right.positive`, negative to negative;
        only the common sign of the two is arbitrary.
    """

    number: slice
    value: float
    left: Side
    right: Side


def read_tokens(
    found: Features, vocabulary: Vocabulary, norm: Norm | None, *, writes: bool, count: int, tokens: int
) -> list[TokenFeature]:
    """Return the first `count` features with `tokens` tokens per end; `writes` marks the right side as an output."""
    groups = found.groups[:count]
    n = groups[-1].stop if groups else 0
    columns, rows = found.left[:, :n], found.right[:n]
    left = _coordinates(vocabulary, columns, norm)
    right = (vocabulary.write(rows[:, :-1]).T, None) if writes else _coordinates(vocabulary, rows.T, norm)
    return [
        TokenFeature(
            number=group,
            value=float(found.values[group.start]),
            left=_side(*left, group, columns[-1], tokens),
            right=_side(*right, group, rows[:, -1], tokens),
        )
        for group in groups
    ]


def _coordinates(vocabulary: Vocabulary, columns: Array, norm: Norm | None) -> tuple[Array, Array | None]:
    """Return token coordinates along columns (vocab, r), and variances over positions and tokens (2, r)."""
    along = vocabulary.read(columns, norm)
    if vocabulary.positions is None:
        return along, None
    token_variance, position_variance = (
        np.var(a, axis=0) for a in vocabulary.read_apart(columns, norm) if a is not None
    )
    return along, np.stack([position_variance, token_variance])


def _side(of_tokens: Array, variances: Array | None, group: slice, constants: Array, count: int) -> Side:
    along = of_tokens[:, group]
    constant = float(np.square(constants[group]).mean())
    by_position = None
    if variances is not None:
        position_variance, token_variance = variances[:, group].sum(axis=1)
        by_position = (
            float(position_variance / (position_variance + token_variance))
            if position_variance + token_variance
            else 0.0
        )
    if along.shape[1] > 1:
        return Side(_top(np.linalg.norm(along, axis=1), count), (), constant, by_position)
    lowest = tuple((token, -size) for token, size in _top(-along[:, 0], count))
    return Side(_top(along[:, 0], count), lowest, constant, by_position)


def _top(sizes: Array, count: int) -> Tokens:
    count = min(count, len(sizes))
    near = np.argpartition(-sizes, count - 1)[:count]
    order = near[np.argsort(-sizes[near], kind="stable")]
    return tuple((int(token), float(sizes[token])) for token in order)
