"""Inner products and distances of formats, nothing dense made."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib.formats.cp import CP
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.linear import Linear, same_legs
from tnlib.formats.low_rank import LowRank
from tnlib.formats.train import TensorTrain, TTMatrix, as_column, refuse_unequal_legs
from tnlib.formats.tucker import Tucker
from tnlib.linalg.modes import mode_product
from tnlib.linalg.scale import as_scalar, exponent, shift
from tnlib.linalg.terms import terms_in_range
from tnlib.linalg.threads import own_threads
from tnlib.ops.convert import convert
from tnlib.ops.trains import as_train, take_apart
from tnlib.sweeps.inner import inner_cores, sandwich_cores
from tnlib.sweeps.scale import even_out


@own_threads
def inner(a: Any, b: Any, operator: TTMatrix | None = None) -> float | complex:
    """Return the sum over all entries of conj(a) times b, or times operator @ b.

    Parameters
    ----------
    a, b
        TensorTrain, TTMatrix, Tucker, CP, LowRank or KroneckerTerms, of the same legs; two kinds are brought to trains
        first.
    operator
        A TTMatrix between two TensorTrains, or two TTMatrices: an expectation value, without the product of ranks.

    Returns
    -------
    float | complex
        A Python number, complex where one of the two is. Linear in the count of cores; a thousand of them neither
        overflow nor underflow on the way.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If the shapes differ, or the result leaves the range of float64.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), section 4.2.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> plus = tnlib.TensorTrain([np.full((1, 2, 1), 2**-0.5)] * 200)
    >>> up = tnlib.TensorTrain([np.array([1.0, 0.0]).reshape(1, 2, 1)] * 200)
    >>> f"{tnlib.inner(up, plus) * 2**100:.6f}"
    '1.000000'
    >>> flip = tnlib.TTMatrix([np.array([[0.0, 1.0], [1.0, 0.0]]).reshape(1, 2, 2, 1)] * 200)
    >>> f"{tnlib.inner(plus, plus, flip):.6f}"
    '1.000000'
    """
    if operator is not None:
        x, twos = _inner_between(a, operator, b)
        return _as_number(x, twos)
    a, b = _pair("inner", a, b)
    if isinstance(a, TensorTrain | TTMatrix):
        (one, e, f), (other, g, h) = take_apart(a), take_apart(b)
        x, twos = inner_cores(one, other)
        x, twos = x * (f * h), twos + e + g
    elif isinstance(a, CP):
        x, twos = _inner_cp(a, b)
    elif isinstance(a, Tucker):
        x, twos = _inner_tucker(a, b)
    elif isinstance(a, KroneckerTerms):
        x, twos = _inner_terms(a, b)
    else:
        (l, e), (r, f), (m, g), (s, h) = (_apart(c) for c in (*a.arrays(), *b.arrays()))
        x, twos = _inner_matrices((l, r), (m, s)), e + f + g + h
    return _as_number(x, twos)


@own_threads
def distance(a: Any, b: Any) -> float:
    """Return norm(a - b), right to roundoff of the norms of `a` and `b`: no squares are subtracted.

    Parameters
    ----------
    a, b
        TensorTrain, TTMatrix, Tucker, CP, LowRank or KroneckerTerms, of the same legs; two kinds are brought to trains
        first.

    Returns
    -------
    float
        The Frobenius norm of the difference, from triangular factors of its train: of two trains that agree to 1e-12
        it is 1e-12 of their norm.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If the shapes differ, or the result leaves the range of float64.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.TensorTrain([np.ones((1, 2, 1))] * 10)
    >>> f"{tnlib.distance(a, (1 + 1e-12) * a) / a.norm():.0e}"
    '1e-12'
    """
    a, b = _pair("distance", a, b)
    difference = a - b
    try:
        return float(difference.norm())
    except ArgumentError:
        raise ArgumentError(
            "distance: the result must lie below 1.8e308, got one beyond; lower the log_scale of both."
        ) from None


def _as_number(x: Any, twos: int) -> float | complex:
    try:
        return as_scalar(x, twos)
    except OverflowError:
        raise ArgumentError(
            "inner: the result must lie below 1.8e308, got one beyond; lower the log_scale of one of the two."
        ) from None


def _inner_between(a: Any, operator: TTMatrix, b: Any) -> tuple[Any, int]:
    as_train("inner", "operator", operator, TTMatrix)
    for name, one in (("a", a), ("b", b)):
        as_train("inner", name, one)
    if type(a) is not type(b):
        raise ArgumentTypeError(
            f"inner: a and b must be of one kind on both sides of an operator, got a {type(a).__name__} and a "
            f"{type(b).__name__}; make one of the other with tnlib.convert."
        )
    left, right = (as_column(t) if isinstance(t, TensorTrain) else t for t in (a, b))
    refuse_unequal_legs("inner, a and operator", left.T, operator)
    refuse_unequal_legs("inner, operator and b", operator, right)
    refuse_unequal_legs("inner, a and b", left, right.T)
    (one, e, f), (between, g, h), (other, i, j) = (even_out(t.cores, t.log_scale) for t in (left, operator, right))
    x, twos = sandwich_cores(one, between, other)
    return x * (f * h * j), twos + e + g + i


def _pair(function: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Return `a` and `b` as formats of one kind."""
    for name, one in (("a", a), ("b", b)):
        if not isinstance(one, Linear):
            raise ArgumentTypeError(
                f"{function}: {name} must be a TensorTrain, TTMatrix, Tucker, CP, LowRank or KroneckerTerms, got a "
                f"{type(one).__name__}; decompose or convert what you have first."
            )
    if type(a) is not type(b):
        kind = TTMatrix if TTMatrix in (type(a), type(b)) else TensorTrain
        a, b = convert(a, kind), convert(b, kind)
    same_legs(function, a, b)
    return a, b


def _apart(a: Any) -> tuple[Any, int]:
    e = exponent(a)
    return shift(a, -e), e


def _inner_terms(a: KroneckerTerms, b: KroneckerTerms) -> tuple[Any, int]:
    (left, right, e), (others, met, f) = (
        terms_in_range(t.left, [r.arrays() if isinstance(r, LowRank) else (r,) for r in t.right]) for t in (a, b)
    )
    grams = left.reshape(len(left), -1).conj() @ others.reshape(len(others), -1).T  # h [(p p')] g
    on_the_right = np.array([[_inner_matrices(one, other) for other in met] for one in right])
    return np.sum(grams * on_the_right), e + f


def _inner_matrices(a: tuple[Any, ...], b: tuple[Any, ...]) -> Any:
    """Return the inner product of two matrices, each one array or two factors."""
    if len(a) == len(b) == 2:
        return np.sum((a[0].conj().T @ b[0]) * (a[1].conj() @ b[1].T))  # r [m] s times r [n] s
    return np.vdot(*(c[0] @ c[1] if len(c) == 2 else c[0] for c in (a, b)))


def _inner_cp(a: CP, b: CP) -> tuple[Any, int]:
    grams, twos = np.ones((len(a.weights), len(b.weights))), 0
    for one, other in zip((a.weights[None], *a.factors), (b.weights[None], *b.factors), strict=True):
        (one, e), (other, f) = _apart(one), _apart(other)
        grams = grams * (one.conj().T @ other)  # R [n] S
        g = exponent(grams)
        grams, twos = shift(grams, -g), twos + e + f + g
    return np.sum(grams), twos


def _inner_tucker(a: Tucker, b: Tucker) -> tuple[Any, int]:
    (core, twos), (small, e) = _apart(a.core), _apart(b.core)
    twos += e
    for k, (one, other) in enumerate(zip(a.factors, b.factors, strict=True)):
        (one, e), (other, f) = _apart(one), _apart(other)
        small = mode_product(small, one.conj().T @ other, k)  # ra0 ... [rbk] rb(k+1) ...
        twos += e + f
    return np.vdot(core, small), twos
