"""Q-, K- and V-composition scores of pairs of heads, and their chance level.

    Q: ||OV Omega|| / (||OV|| ||Omega||)     K: ||OV Omega^T|| / ...     V: ||OV OV'|| / ...      Frobenius norms

Every operator is a product of two factors, OV = A B and Omega = C D. With QR decompositions A = Q T and D^T = P S,
||A B C D|| = ||(T B)(C S^T)||: a product of d_head x d_model with d_model x d_head for every pair. Activations enter as
weights in T and S: T^T T = A^T M A with the second moments M of the input of the head.

The chance level is the root mean square of the score with a random rotation U between L and R. U is uniform over the
orthogonal group of the rotated subspace, which excludes the constant coordinate and, in a centred stream, the vector of
ones. With the orthogonal projectors F on the fixed subspace and T = 1 - F on the rotated one, in n = rank T dimensions,

    L (F + U) R = L F R + L U R,     E U = 0,     E U^T A U = T tr(T A T) / n

    E ||L (F + U) R||^2 = ||L F R||^2 + ||L T||^2 ||T R||^2 / n

because the cross term is linear in U. Without biases and centring F = 0, and chance is 1 / sqrt(d_model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, LowRank
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_flag, check_choice, is_list
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import largest, norm
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, check_form
from tnlib_adapters.circuits.arguments import (
    Kind,
    as_folded_layers,
    folded_moments,
    head_name,
)
from tnlib_adapters.circuits.composition.pair_norms import gram_root, padded_stack, pair_norms, quotient
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.reference.model import Forward
from tnlib_adapters.result_table import Columns, Table, descending


@dataclass(frozen=True)
class Score:
    """A composition score and its chance level, the root mean square over random rotations.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), for the score.

    Examples
    --------
    >>> Score(0.5, chance=0.125).multiple
    4.0
    """

    score: float
    chance: float

    @property
    def multiple(self) -> float:
        """Score divided by chance level; 0 where an operator is zero."""
        return self.score / self.chance if self.chance else 0.0


def composition_score(left: LowRank, right: LowRank, *, centred: bool = False) -> Score:
    r"""Return the composition score :math:`\|L R\| / (\|L\| \|R\|)` of two operators and its chance level.

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
    >>> up, down = np.eye(17)[:16, :3], np.eye(17)[:3]  # the first three of 16 features
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
    return Score(score, float(chance(b[None], c.T[None], centred=centred)[0, 0]))


def chance(b: Array, c: Array, *, centred: bool) -> Array:
    """Return the chance levels (writers, readers) of operators that end in b (writers, r, d~) or begin with c^T.

    c is (readers, r, d~). All have norm 1 or 0; their outer factors are isometric and omitted.
    """
    (b_stays, b_turns), (c_stays, c_turns) = (_parts(a, centred) for a in (b, c))
    n = b.shape[2] - 1 - int(centred)
    writers, readers = (np.einsum("hrf,hrg->hfg", a, a, dtype=np.float64) for a in (b_stays, c_stays))  # h [r] f f
    fixed = np.einsum("hfg,kfg->hk", writers, readers)  # h k [f f]: ||L F R||^2 = tr (L F)^T (L F) (F R) (F R)^T
    free = np.outer(*(np.vecdot(a, a).sum(axis=1, dtype=np.float64) for a in (b_turns, c_turns)))  # h [r d]
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


@dataclass(frozen=True, eq=False, repr=False)
class Compositions(Table):
    """Composition scores of all pairs of heads, returned by `compositions`.

    Parameters
    ----------
    kind
        "Q", "K" or "V".
    scores
        (layers, heads, layers, heads): writing head, reading head; NaN unless the writing head is in an earlier layer.
    chance
        Same shape: the root mean square of the score over random rotations between the two heads.
    notes
        Sentences on norms and biases that were folded into the heads, or could not be.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    The keys of the induction heads, all of layer 1, read the output of the previous-token head, 0.3:

    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> compositions(model, "K").multiples[0, 3, 1].round(1)
    array([2. , 2. , 2. , 1.9])
    """

    kind: Kind
    scores: Array
    chance: Array
    notes: tuple[str, ...] = ()

    _HIDDEN = ("kind",)
    _FORMATS: ClassVar = {"multiple": ".2f"}
    _SHOWN = 5

    @property
    def multiples(self) -> Array:
        """Scores divided by chance level, (layers, heads, layers, heads); 0 where an operator is zero."""
        return quotient(self.scores, self.chance)

    def __getitem__(self, pair: tuple[Head, Head]) -> Score:
        try:
            (i, g), (j, h) = pair
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"Compositions: pair must be two heads, ((layer, head), (layer, head)), got {pair!r}; "
                "the one that writes comes first."
            ) from None
        n_layers, n_heads = self.scores.shape[:2]
        writer, reader = (
            (as_index("Compositions", "layer", layer, n_layers), as_index("Compositions", "head", head, n_heads))
            for layer, head in ((i, g), (j, h))
        )
        if writer[0] >= reader[0]:
            raise ArgumentError(
                f"Compositions: pair must be a head that writes and one of a later layer that reads, got {pair!r}; "
                "heads of one layer do not read each other."
            )
        return Score(float(self.scores[*writer, *reader]), float(self.chance[*writer, *reader]))

    def largest(self, n: int) -> list[tuple[Head, Head, Score]]:
        """Return the n pairs with the largest multiples of chance: writer and reader (layer, head), and the score."""
        order = self._pairs[: as_count("Compositions.largest", "n", n, least=0)]
        pairs = [tuple(map(int, np.unravel_index(k, self.scores.shape))) for k in order]
        return [((a, b), (c, d), self[(a, b), (c, d)]) for a, b, c, d in pairs]

    @property
    def _pairs(self) -> Array:
        """Flat indices of all pairs, the largest multiple first."""
        return descending(self.multiples, int(np.isfinite(self.scores).sum()))

    @property
    def _title(self) -> str:
        return f"{self.kind}-composition, {len(self._pairs)} pairs of heads"

    def _columns(self, rows: Any) -> Columns:
        at = np.unravel_index(self._pairs[rows], self.scores.shape)
        writers, readers = ([head_name(head) for head in zip(*side, strict=True)] for side in (at[:2], at[2:]))
        numbers = {"score": self.scores[at], "chance": self.chance[at], "multiple": self.multiples[at]}
        return {"kind": [self.kind] * len(writers), "writer": writers, "reader": readers, **numbers}

    def _picture(self) -> str:
        n_layers, n_heads = self.scores.shape[:2]
        above_chance = np.nan_to_num(self.multiples - 1).reshape(n_layers * n_heads, -1)
        label = "multiples of chance, less 1; writers as rows, readers as columns"
        return heat_image(above_chance, label, width=160)


@accepts_models
def compositions(
    model: Checkpoint | Sequence[Attention],
    kind: Kind,
    *,
    distance: int | None = None,
    moments: Sequence[Array] | None = None,
    centred: bool | None = None,
) -> Compositions:
    r"""Return the composition scores of every head with every head of an earlier layer, biases included.

    The value bias is part of the writing operator, the biases of queries and keys part of the reading operator. No head
    writes the constant coordinate, so a reader with large biases has a low score and a low chance level.

    Parameters
    ----------
    model
        A checkpoint or transformers model, or attention layers in order. Where norms precede the attention of a model,
        it is folded first (see `fold`): the norm weights are then part of the reading heads, and the value biases,
        which do not depend on the pattern, are moved out of the heads. Layers are used as they are.
    kind
        "Q", "K" or "V": composition through the queries, keys or values of the later head.
    distance
        Query position minus key position; for Q and K where scores depend on it (rotary embeddings, ALiBi).
    moments
        Per layer (d_model + 1, d_model + 1), the mean of :math:`\tilde x{}^T \tilde x` over the input of that layer
        (see `stream_moments`), of `model` before folding. The norm of OV is then the root mean square of the head's
        output for the same attention weights, and Omega is weighted by the input of the other side of its scores. None
        weights all directions equally.
    centred
        Whether the mean over features is projected out. None: for a checkpoint, True if LayerNorm precedes its
        attention; for layers, False.

    Returns
    -------
    Compositions
        `scores`, `chance` and `multiples`, each (layers, heads, layers, heads), and `notes` on what was folded. The
        repr lists the pairs furthest above chance.

    Raises
    ------
    ArgumentError
        If layers differ in shape, a distance is missing, queries and keys are normalised (pass
        `attention.numerator()` of all layers), or moments have the wrong shape.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> compositions(model, "K").largest(4)[0][0]
    (0, 3)
    """
    check_choice("compositions", "kind", kind, get_args(Kind))
    layers, centred, notes, folded = as_folded_layers("compositions", model, centred)
    for attention in layers if kind != "V" else []:
        check_form("compositions", attention, distance)
    weights = _moments(moments, layers)
    if isinstance(model, Checkpoint) and folded is not model:
        weights = [m if m is None else folded_moments(model, folded, k, m) for k, m in enumerate(weights)]
    return compositions_of_kinds(layers, [kind], distance, centred, weights, notes)[0]


@single_threaded_blas
def compositions_of_kinds(
    layers: Sequence[Attention],
    kinds: Sequence[Kind],
    distance: int | None,
    centred: bool,
    moments: Sequence[Array | None] | None = None,
    notes: tuple[str, ...] = (),
) -> list[Compositions]:
    """Return the composition scores of several kinds; what the heads write is computed once."""
    n_layers, n_heads = len(layers), layers[0].n_heads
    moments = [None] * n_layers if moments is None else moments
    both = np.full((2, n_layers, n_heads, n_layers, len(kinds), n_heads), np.nan)
    if n_layers > 1:
        b = _writers(layers[:-1], moments[:-1], centred)
        c = _readers(layers[1:], kinds, distance, moments[1:], centred)
        is_later = np.tri(n_layers - 1, dtype=bool).T[:, None, :, None, None]
        for of_all, values in zip(both, (pair_norms(b, c, n_layers - 1), chance(b, c, centred=centred)), strict=True):
            of_pairs = values.reshape(n_layers - 1, n_heads, n_layers - 1, len(kinds), n_heads)
            of_all[:-1, :, 1:] = np.where(is_later, of_pairs, np.nan)
    return [Compositions(kind, both[0, ..., k, :], both[1, ..., k, :], notes) for k, kind in enumerate(kinds)]


def stream_moments(forward: Forward) -> list[Array]:
    r"""Return per layer the second moments of the attention inputs x, (d_model + 1, d_model + 1).

    They are the mean of :math:`\tilde x{}^T \tilde x` with :math:`\tilde x = [x, 1]`.

    Parameters
    ----------
    forward
        Forward pass, returned by `tnlib_adapters.reference.run`.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> moments = stream_moments(run(model, [5, 6, 7, 5]))
    >>> [m.shape for m in moments], float(moments[0][-1, -1])
    ([(65, 65), (65, 65)], 1.0)
    """
    if not isinstance(forward, Forward):
        raise ArgumentTypeError(
            f"stream_moments: forward must be a Forward, got {type(forward).__name__}; pass run(model, tokens)."
        )
    moments = []
    for x in forward.inputs:
        rows = x.reshape(-1, x.shape[-1])
        rows = np.concatenate([rows, np.ones_like(rows[:, :1])], axis=1)  # position d~
        moments.append(rows.T @ rows / len(rows))  # d~ [position] d~
    return moments


# ------------------------------------------------------------------------------------------- writing, reading factors


def _writers(layers: Sequence[Attention], moments: Sequence[Array | None], centred: bool) -> Array:
    """Return T B of all heads, (heads, r, d~)."""
    pairs = zip(layers, moments, strict=True)
    return np.stack([_factor(_centred(layer.ov(h), centred), m) for layer, m in pairs for h in range(layer.n_heads)])


def _readers(
    layers: Sequence[Attention],
    kinds: Sequence[Kind],
    distance: int | None,
    moments: Sequence[Array | None],
    centred: bool,
) -> Array:
    """Return S C^T of all heads, (layers kinds heads, r, d~), with rows of zeros where a kind has a lower rank."""
    factors = []
    for layer, m in zip(layers, moments, strict=True):
        for kind in kinds:
            weight = None if kind == "V" else m  # the right side of V-composition is an output: no second moments
            operators = (_reader(layer, h, kind, distance) for h in range(layer.n_heads))
            factors += [_factor(_centred(operator, centred).T, weight) for operator in operators]
    return padded_stack(factors)


def _reader(attention: Attention, head: int, kind: Kind, distance: int | None) -> LowRank:
    if kind == "V":
        return attention.ov(head)
    omega = attention.qk(head, distance)
    return omega if kind == "Q" else omega.T


def _factor(operator: LowRank, moments: Array | None) -> Array:
    """Return T B of A B, of norm 1, with T^T T = A^T A, or A^T M A if moments M are given."""
    outer = unit(operator.left)
    t = r_factor(outer) if moments is None else gram_root(outer.T @ moments @ outer).astype(outer.dtype)
    return unit(t @ unit(operator.right))


def _centred(operator: LowRank, centred: bool) -> LowRank:
    """Project the mean over features out of both sides; the constant coordinate is unchanged."""
    if not centred:
        return operator
    left, right = operator.left.copy(), operator.right.copy()
    left[:-1] -= left[:-1].mean(axis=0)
    right[:, :-1] -= right[:, :-1].mean(axis=1, keepdims=True)
    return LowRank(left, right)


# --------------------------------------------------------------------------------------------------- argument checks


def _moments(moments: Sequence[Array] | None, layers: Sequence[Attention]) -> list[Array | None]:
    if moments is None:
        return [None] * len(layers)
    size = layers[0].d_model + 1
    if not is_list(moments):
        raise ArgumentTypeError(
            f"compositions: moments must be a list of matrices, got {type(moments).__name__}; "
            "stream_moments returns them."
        )
    if len(moments) != len(layers):
        raise ArgumentError(
            f"compositions: moments must be one matrix per layer, {len(layers)}, got {len(moments)}; "
            "stream_moments returns them."
        )
    checked: list[Array | None] = []
    for layer, matrix in enumerate(moments):
        m = as_array("compositions", f"moments of layer {layer}", matrix)
        if m.shape != (size, size):
            raise ArgumentError(
                f"compositions: moments of layer {layer} must have shape ({size}, {size}), the constant coordinate "
                f"last, got {m.shape}; pass the mean of x~^T x~, x~ = [x, 1]."
            )
        if not np.allclose(m, m.T, rtol=1e-3, atol=1e-6 * float(np.abs(m).max())):
            raise ArgumentError(
                f"compositions: moments of layer {layer} must be symmetric, got a matrix whose transpose differs by "
                f"{np.abs(m - m.T).max():.3g}; pass the mean of x~^T x~, x~ = [x, 1]."
            )
        checked.append(unit(m.astype(np.float64)))  # the scale cancels in the score
    return checked
