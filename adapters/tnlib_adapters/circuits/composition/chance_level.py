r"""Composition score of two operators, and its root mean square over random rotations (chance level).

Rows x~ = [x, 1] pass through L, which writes into the residual stream, and then through R, which reads from it:

    score = ||L R|| / (||L|| ||R||)                                               Frobenius norms

The chance level is the root mean square of the score with a random rotation U between L and R. U is uniform over the
orthogonal group of the rotated subspace, which excludes the constant coordinate and, in a centred stream, the vector of
ones. With the orthogonal projectors F on the fixed subspace and T = 1 - F on the rotated one, in n = rank T dimensions,

    L (F + U) R = L F R + L U R,     E U = 0,     E U^T A U = T tr(T A T) / n

    E ||L (F + U) R||^2 = ||L F R||^2 + ||L T||^2 ||T R||^2 / n

because the cross term is linear in U. Without biases and centring F = 0, and chance is 1 / sqrt(d_model).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, LowRank
from tnlib._typing import Array
from tnlib._validate import as_flag
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import largest, norm


@dataclass(frozen=True)
class Score:
    """A composition score and its chance level, the root mean square over random rotations."""

    score: float
    chance: float

    @property
    def multiple(self) -> float:
        """Score divided by chance level; 0 where an operator is zero."""
        return self.score / self.chance if self.chance else 0.0


def composition_score(left: LowRank, right: LowRank, *, centred: bool = False) -> Score:
    """Return the composition score ||L R|| / (||L|| ||R||) of two operators and its chance level.

    Parameters
    ----------
    left
        (m, d_model + 1), in homogeneous coordinates: the writing operator, for example `attention.ov(head)`.
    right
        (d_model + 1, k), the reading operator: `qk(head)` for queries, `qk(head).T` for keys, `ov(head)` for values.
    centred
        Whether random rotations fix the vector of ones: True for a stream that LayerNorm reads, because LayerNorm
        subtracts the mean over features.

    Returns
    -------
    Score
        `score` in [0, 1], `chance`, and `multiple`, the quotient of the two.

    Raises
    ------
    ArgumentError
        If the inner dimensions differ or are smaller than 2.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), for the score.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> up, down = np.eye(17)[:16, :3], np.eye(17)[:3]                # of 16 features the first three
    >>> found = composition_score(tnlib.LowRank(up, down), tnlib.LowRank(down.T, up.T))
    >>> f"{found.score:.3f}, {found.multiple:.2f} times chance"
    '0.577, 2.31 times chance'
    """
    for name, operator in (("left", left), ("right", right)):
        if not isinstance(operator, LowRank):
            raise ArgumentTypeError(
                f"composition_score: {name} must be a LowRank, got {type(operator).__name__}; "
                "pass attention.ov(head), attention.qk(head) or tnlib.LowRank(a, b)."
            )
    if left.shape[1] != right.shape[0] or left.shape[1] < 2:
        raise ArgumentError(
            f"composition_score: right must have as many rows as left has columns, at least 2 (features and the "
            f"constant coordinate), got {right.shape} and {left.shape}; pass heads of one model."
        )
    centred = as_flag("composition_score", "centred", centred)
    b = unit(r_factor(unit(left.left)) @ unit(left.right))
    c = unit(unit(right.left) @ r_factor(unit(right.right).T).T)
    score = norm(b @ c)  # r [d~] r
    return Score(score, float(chance(b[None], c[None], centred=centred)[0, 0]))


def chance(b: Array, c: Array, *, centred: bool) -> Array:
    """Return the chance levels (writers, readers) of operators that end in b (writers, r, d~) or begin with c.

    c is (readers, d~, r). All have norm 1 or 0; their outer factors are isometric and omitted.
    """
    b, c = b.astype(np.float64), c.astype(np.float64).transpose(0, 2, 1)  # reader r d~
    (b_stays, b_turns), (c_stays, c_turns) = (_parts(a, centred) for a in (b, c))
    n = b.shape[2] - 1 - int(centred)
    writers, readers = (np.einsum("hrf,hrg->hfg", a, a) for a in (b_stays, c_stays))  # h [r] f f
    fixed = np.einsum("hfg,kfg->hk", writers, readers)  # h k [f f]: ||L F R||^2 = tr (L F)^T (L F) (F R) (F R)^T
    free = np.outer(*(np.square(a).sum(axis=(1, 2)) for a in (b_turns, c_turns)))
    return np.asarray(np.sqrt(np.maximum(fixed, 0) + free / max(n, 1)))


def unit(a: Array) -> Array:
    """Return a / ||a|| without overflow or underflow; zero for zero."""
    top = largest(a)
    if top == 0:
        return a
    scaled = a / a.dtype.type(top)
    return np.asarray(scaled / scaled.dtype.type(norm(scaled)))


def _parts(a: Array, centred: bool) -> tuple[Array, Array]:
    """Split rows (..., d~) into coordinates in the fixed subspace, (..., f), and in the rotated one, (..., d)."""
    stream, constant = a[..., :-1], a[..., -1:]
    if not centred:
        return constant, stream
    mean = stream.mean(axis=-1, keepdims=True)
    return np.concatenate([constant, np.sqrt(stream.shape[-1]) * mean], axis=-1), stream - mean
