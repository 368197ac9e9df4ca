"""One format as another, where that is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_sizes
from tnlib.formats.base import Dense
from tnlib.formats.cp import CP
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.train import TensorTrain, TTMatrix, as_column
from tnlib.formats.tucker import Tucker
from tnlib.formats.vidal import Vidal
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.product import product_svd
from tnlib.linalg.scale import exponent, norm, shift
from tnlib.linalg.threads import own_threads
from tnlib.ops.canonicalize import vidal
from tnlib.ops.trains import take_apart
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.dense import cores_to_dense, fuse_row_and_column
from tnlib.sweeps.multilinear import diagonal_cores, narrow_legs, widen_legs
from tnlib.sweeps.split import dense_to_cores

F = TypeVar("F", bound=Dense)

_LARGEST_CORE = 1 << 31  # entries of a Tucker core; a train of many legs has none

# What finds a format where no exact conversion does.
_DECOMPOSITIONS = {
    "CP": "tnlib.cp",
    "Tucker": "tnlib.tucker",
    "TensorTrain": "tnlib.tt_svd",
    "TTMatrix": "tnlib.ttm_svd",
    "LowRank": "tnlib.svd",
    "SVD": "tnlib.svd",
}


@own_threads
def convert(value: Any, kind: type[F], *, row_shape: Sequence[int] | None = None) -> F:
    """Return `value` as a `kind`, equal to roundoff.

    CP becomes Tucker or a train with diagonal cores; Tucker a train, and a train Tucker at its numerical ranks; a
    TT-matrix a train with fused legs, and a train a TT-matrix; LowRank and SVD a train of two cores, and back;
    KroneckerTerms a TT-matrix of two cores, and back; a train its Vidal form, and back. Whatever has two legs becomes
    any other format that has.

    Parameters
    ----------
    value
        Any format.
    kind
        TensorTrain, TTMatrix, Tucker, CP, LowRank, SVD, KroneckerTerms or Vidal.
    row_shape
        Only from TensorTrain to TTMatrix: how many rows each leg counts, the rest being columns. All of them where it
        is left out, so that a train becomes one column.

    Returns
    -------
    kind
        Gauges are what the conversion leaves: Tucker with orthonormal factors; trains without a centre.

    Raises
    ------
    ArgumentTypeError
        If there is no exact conversion; the message names the decomposition to call instead.
    ArgumentError
        If `value` has too many legs for `kind`, or `row_shape` does not divide its legs.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> cp = tnlib.CP([2.0, 1.0], [np.eye(3, 2)] * 4)
    >>> train = tnlib.convert(cp, tnlib.TensorTrain)
    >>> train.ranks, tnlib.convert(train, tnlib.Tucker).ranks
    ((1, 2, 2, 2, 1), (2, 2, 2, 2))
    """
    if not isinstance(kind, type) or not issubclass(kind, Dense):
        raise ArgumentTypeError(f"convert: kind must be a format, got {kind!r}; pass for example tnlib.TensorTrain.")
    if not isinstance(value, Dense):
        raise ArgumentTypeError(
            f"convert: value must be a format, got a {type(value).__name__}; decompose it first, for example with "
            f"{_DECOMPOSITIONS.get(kind.__name__, 'tnlib.tt_svd')}."
        )
    if row_shape is not None:
        if not isinstance(value, TensorTrain) or kind is not TTMatrix:
            raise ArgumentTypeError(
                f"convert: row_shape must be left out from {type(value).__name__} to {kind.__name__}, got {row_shape}; "
                "it splits the legs of a TensorTrain."
            )
        return _split_legs(value, as_sizes("convert", "row_shape", row_shape))  # type: ignore[return-value]
    if isinstance(value, kind):
        return value
    step: Any = value
    try:
        for found in _steps(value, kind):
            step = found(step)
    except ArgumentTypeError:  # of the last step, which does not know where the first one began
        raise _not_exact(value, kind) from None
    return step  # type: ignore[no-any-return]


def _steps(value: Any, kind: type) -> list[Callable[[Any], Any]]:
    """Return one conversion, or two that meet in a train or in a product of two matrices."""
    if (type(value), kind) in _EXACT:
        return [_EXACT[type(value), kind]]
    between = [LowRank, TensorTrain] if len(value.shape) == 2 else [TensorTrain]
    for middle in between:
        if TTMatrix not in (type(value), kind) and {(type(value), middle), (middle, kind)} <= _EXACT.keys():
            return [_EXACT[type(value), middle], _EXACT[middle, kind]]
    raise _not_exact(value, kind)


def _not_exact(value: Dense, kind: type) -> ArgumentTypeError:
    remedy = _DECOMPOSITIONS.get(kind.__name__)
    advice = f"call {remedy} on its .full()" if remedy else "choose another format"
    return ArgumentTypeError(
        f"convert: value must be one that a {kind.__name__} holds exactly, got a {type(value).__name__} of shape "
        f"{value.shape}; {advice}."
    )


def _two_legs(value: Any, kind: type) -> None:
    if len(value.shape) != 2:
        raise _not_exact(value, kind)


def _in_range(arrays: Sequence[Array], dtype: Any) -> tuple[list[Array], float]:
    """Return arrays that can be multiplied with each other, and the logarithm of what was set aside."""
    exponents = [exponent(a) for a in arrays]
    scaled = [shift(a.astype(dtype, copy=False), -e) for a, e in zip(arrays, exponents, strict=True)]
    return scaled, sum(exponents) * math.log(2)


def _cp_to_train(cp: CP) -> TensorTrain:
    (weights, first, *others), log_scale = _in_range(cp.arrays(), cp.dtype)
    return TensorTrain(tuple(diagonal_cores([first * weights, *others])), None, log_scale)


def _cp_to_tucker(cp: CP) -> Tucker:
    """Factors with more rows than columns lend their triangles to the core."""
    _refuse_large_core(cp, [min(factor.shape) for factor in cp.factors])
    pairs = [qr_positive(factor.astype(cp.dtype, copy=False)) for factor in cp.factors]
    core = CP(cp.weights, tuple(r for _, r in pairs)).full()
    return Tucker(core.astype(cp.dtype, copy=False), tuple(q for q, _ in pairs))


def _cp_to_low_rank(cp: CP) -> LowRank:
    _two_legs(cp, LowRank)
    left, right = cp.factors
    return LowRank(left * cp.weights, right.T)


def _tucker_to_train(tucker: Tucker) -> TensorTrain:
    (core, *factors), log_scale = _in_range(tucker.arrays(), tucker.dtype)
    sides = [min(math.prod(core.shape[:k]), math.prod(core.shape[k:])) for k in range(1, core.ndim)]
    small = dense_to_cores(np.ascontiguousarray(core), Budget(norm(core), None, sides, core.dtype), None)
    return TensorTrain(tuple(widen_legs(small, factors)), None, log_scale)


def _tucker_to_low_rank(tucker: Tucker) -> LowRank:
    _two_legs(tucker, LowRank)
    left, right = tucker.factors
    return LowRank(left @ tucker.core, right.T)


def _train_to_tucker(train: TensorTrain) -> Tucker:
    cores, twos, scale = take_apart(train)
    factors, small, more = narrow_legs(cores)
    _refuse_large_core(train, [core.shape[1] for core in small])
    core = cores_to_dense(small).reshape([core.shape[1] for core in small])
    return Tucker(shift(core * core.real.dtype.type(scale), twos + more), tuple(factors))


def _refuse_large_core(value: Dense, ranks: Sequence[int]) -> None:
    if math.prod(ranks) > _LARGEST_CORE or len(ranks) > 64:
        raise ArgumentError(
            f"convert: the core of a Tucker must have at most {_LARGEST_CORE:,} numbers and 64 legs, got "
            f"{math.prod(ranks):.3g} and {len(ranks)}; stay with the {type(value).__name__}."
        )


def _train_to_cp(train: TensorTrain) -> CP:
    """Return the sum of outer products that a train of bonds of size 1, or of two cores, already is."""
    if max(train.ranks) > 1 and len(train.cores) > 2:
        raise _not_exact(train, CP)
    cores, twos, scale = take_apart(train)
    factors = [core.transpose(1, 0, 2).reshape(core.shape[1], -1) for core in cores]  # n (l r)
    weights = shift(np.full(factors[0].shape[1], scale, cores[0].real.dtype), twos)
    return CP(weights, tuple(factors))


def _train_to_low_rank(train: TensorTrain) -> LowRank:
    _two_legs(train, LowRank)
    (left, right), twos, scale = take_apart(train)
    return LowRank(shift(left[0] * left.real.dtype.type(scale), twos), right[:, :, 0])


def _split_legs(train: TensorTrain, rows: Sequence[int]) -> TTMatrix:
    if len(rows) != len(train.cores) or any(n % m for n, m in zip(train.shape, rows, strict=False)):
        raise ArgumentError(
            f"convert: row_shape must divide the legs {train.shape} one by one, got {tuple(rows)}; "
            "every leg is rows times columns."
        )
    cores = [core.reshape(len(core), m, -1, core.shape[2]) for core, m in zip(train.cores, rows, strict=True)]
    return TTMatrix(tuple(cores), train.center, train.log_scale)


def _low_rank_to_svd(value: LowRank) -> SVD:
    (left, right), log_scale = _in_range(value.arrays(), value.dtype)
    u, s, vh = product_svd(left, right)
    return SVD(u, shift(s, round(log_scale / math.log(2))), vh)


def _svd_to_low_rank(value: SVD, kind: type = LowRank) -> LowRank:
    _two_legs(value, kind)
    plain = LowRank(value.u * value.s, value.vh)
    return plain if value.left == (0,) else plain.T


def _low_rank_to_train(value: LowRank) -> TensorTrain:
    return TensorTrain((value.left[None], value.right[:, :, None]))


def _svd_to_train(value: SVD) -> TensorTrain:
    return _low_rank_to_train(_svd_to_low_rank(value, TensorTrain))


def _terms_to_matrix(value: KroneckerTerms) -> TTMatrix:
    left = value.left.transpose(1, 2, 0)[None]  # 1 p p' H
    right = np.stack([np.asarray(term) for term in value.right])[..., None]  # H q q' 1
    return TTMatrix((left, right))


def _matrix_to_terms(value: TTMatrix) -> KroneckerTerms:
    if len(value.cores) != 2:
        raise _not_exact(value, KroneckerTerms)
    flat = TensorTrain(tuple(fuse_row_and_column(value.cores)), value.center, value.log_scale)
    held = _train_to_low_rank(flat)
    (m, n), (p, q) = (core.shape[1:3] for core in value.cores)
    return KroneckerTerms(held.left.T.reshape(-1, m, n), tuple(held.right.reshape(-1, p, q)))


def _matrix_to_train(value: TTMatrix) -> TensorTrain:
    return TensorTrain(tuple(fuse_row_and_column(value.cores)), value.center, value.log_scale)


_EXACT: dict[tuple[type, type], Callable[[Any], Any]] = {
    (CP, TensorTrain): _cp_to_train,
    (CP, Tucker): _cp_to_tucker,
    (CP, LowRank): _cp_to_low_rank,
    (Tucker, TensorTrain): _tucker_to_train,
    (Tucker, LowRank): _tucker_to_low_rank,
    (TensorTrain, Tucker): _train_to_tucker,
    (TensorTrain, CP): _train_to_cp,
    (TensorTrain, LowRank): _train_to_low_rank,
    (TensorTrain, TTMatrix): as_column,
    (TensorTrain, Vidal): vidal,
    (TTMatrix, TensorTrain): _matrix_to_train,
    (TTMatrix, KroneckerTerms): _matrix_to_terms,
    (KroneckerTerms, TTMatrix): _terms_to_matrix,
    (LowRank, TensorTrain): _low_rank_to_train,
    (LowRank, SVD): _low_rank_to_svd,
    (SVD, LowRank): _svd_to_low_rank,
    (SVD, TensorTrain): _svd_to_train,
    (Vidal, TensorTrain): Vidal.train,
}
