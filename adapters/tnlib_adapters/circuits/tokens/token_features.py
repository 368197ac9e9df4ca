"""Singular features in token space: which tokens stand at the ends of a direction, or deepest in a span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.circuits.heads.singular_features import Features
from tnlib_adapters.circuits.tokens.vocabulary import Vocabulary
from tnlib_adapters.reference.layers import Norm

Tokens = tuple[tuple[int, float], ...]  # number of a token and how strongly it stands along a direction


@dataclass(frozen=True)
class Side:
    """One side of a feature in tokens, the strongest first.

    Parameters
    ----------
    positive, negative
        Tokens with the largest and with the least coordinate along the direction. Of a span, whose directions mean
        nothing one by one, `positive` has the tokens with the longest projection and `negative` none.
    constant
        The part of the squared length that lies on the constant coordinate, where biases are; 0 on a side that writes.
    by_position
        Of what the coordinates of tokens and of learned positions vary by, the part of positions: near 1 the direction
        is one of positions, and its tokens mean little. None on a side that writes, and where positions are not
        learned.
    """

    positive: Tokens
    negative: Tokens
    constant: float
    by_position: float | None


@dataclass(frozen=True, eq=False, repr=False)
class TokenFeature:
    """A pair of directions, or of spans, in tokens.

    Parameters
    ----------
    number
        Which singular values they are.
    value
        The singular value, of a span the largest.
    left, right
        What is asked along and what answers, or what is read and what is written. `left.positive` goes with
        `right.positive`, negative with negative; changing the sign of both changes nothing.
    """

    number: slice
    value: float
    left: Side
    right: Side


def read_tokens(
    found: Features, vocabulary: Vocabulary, norm: Norm | None, *, writes: bool, count: int, tokens: int
) -> list[TokenFeature]:
    """Return the first `count` features with `tokens` tokens at every end; `writes` says that the right side does."""
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
    """Return where every token stands along columns (vocab, r), and variances over positions and tokens (2, r)."""
    along = vocabulary.read(columns, norm)
    if vocabulary.positions is None:
        return along, None
    said, moved = (np.var(a, axis=0) for a in vocabulary.read_apart(columns, norm) if a is not None)
    return along, np.stack([moved, said])


def _side(of_tokens: Array, variances: Array | None, group: slice, constants: Array, count: int) -> Side:
    along = of_tokens[:, group]
    constant = float(np.square(constants[group]).mean())
    by_position = None
    if variances is not None:
        moved, said = variances[:, group].sum(axis=1)
        by_position = float(moved / (moved + said)) if moved + said else 0.0
    if along.shape[1] > 1:
        return Side(_top(np.linalg.norm(along, axis=1), count), (), constant, by_position)
    lowest = tuple((token, -size) for token, size in _top(-along[:, 0], count))
    return Side(_top(along[:, 0], count), lowest, constant, by_position)


def _top(sizes: Array, count: int) -> Tokens:
    count = min(count, len(sizes))
    near = np.argpartition(-sizes, count - 1)[:count]
    order = near[np.argsort(-sizes[near], kind="stable")]
    return tuple((int(token), float(sizes[token])) for token in order)
