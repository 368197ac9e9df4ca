"""Random token sequences with a repeated segment, the training data of the built-in induction model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tnlib._errors import ArgumentTypeError
from tnlib._validate import as_count, as_flag


def repeated_segments(
    n: int, *, vocab: int = 128, context: int = 96, rng: np.random.Generator, distinct: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw sequences of uniform tokens in which a random segment occurs twice.

    The length of the segment is uniform in ``context // 24 ... 5 * context // 12`` (4 ... 40 for 96). Its first offset
    is uniform over the offsets that leave room for a second copy, its second offset uniform over the remaining ones.
    The distance is therefore random, and only the preceding token predicts the next one.

    Parameters
    ----------
    n : int
        Number of sequences.
    vocab : int
        Tokens are drawn from ``0 ... vocab - 1``.
    context : int
        Length of a sequence, at least 48 (below that, segments can be too short to have a repeated token).
    rng : numpy.random.Generator
        Source of randomness; equal states give equal sequences.
    distinct : bool
        Draw the tokens outside the second copy without replacement, so that nothing but the segment occurs
        twice. Otherwise they are independent, and a token can also recur by chance.

    Returns
    -------
    tokens : (n, context) int64
        The sequences.
    repeated : (n, context) bool
        True where a token lies in the second copy and is not its first, and is therefore predictable from the
        preceding tokens. The first token of the copy and tokens outside of it are not.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `n` is negative, `vocab` below 1 (below `context` where `distinct`) or `context` below 48.

    References
    ----------
    C. Olsson et al., "In-context Learning and Induction Heads" (2022).

    Examples
    --------
    >>> tokens, repeated = repeated_segments(1000, rng=np.random.default_rng(0))
    >>> tokens.shape, int(repeated.sum(axis=1).min()), int(repeated.sum(axis=1).max())
    ((1000, 96), 3, 39)
    """
    distinct = as_flag("repeated_segments", "distinct", distinct)
    n = as_count("repeated_segments", "n", n, least=0)
    context = as_count("repeated_segments", "context", context, least=48)
    vocab = as_count("repeated_segments", "vocab", vocab, least=context if distinct else 1)
    if not isinstance(rng, np.random.Generator):
        raise ArgumentTypeError(
            f"repeated_segments: rng must be a numpy Generator, got {rng!r:.80}; pass numpy.random.default_rng(0)."
        )
    length = rng.integers(context // 24, 5 * context // 12, size=(n, 1), endpoint=True)
    # Drawn one after the other: a uniform pair of offsets rarely starts late, and a model trained on such pairs
    # does not learn to read the last third of the context.
    first = rng.integers(0, context - 2 * length, endpoint=True)  # (n, 1)
    second = rng.integers(first + length, context - length, endpoint=True)  # (n, 1)
    if distinct:
        tokens = rng.permuted(np.tile(np.arange(vocab, dtype=np.int64), (n, 1)), axis=1)[:, :context]
    else:
        tokens = rng.integers(0, vocab, size=(n, context), dtype=np.int64)

    position = np.arange(context)[None, :]
    copied = (position >= second) & (position < second + length)
    source = np.where(copied, position - (second - first), position)
    return np.take_along_axis(tokens, source, axis=1), copied & (position > second)
