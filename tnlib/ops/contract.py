"""Some legs of a format summed: alone, against vectors, or against another train."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, is_list, so_many
from tnlib.formats.cp import CP
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker
from tnlib.linalg.modes import mode_product
from tnlib.linalg.scale import as_scalar, exponent, shift
from tnlib.linalg.threads import own_threads
from tnlib.ops.trains import as_train, take_apart
from tnlib.sweeps.contraction import absorb, sum_over_both


@own_threads
def contract(value: Any, other: Any, legs: int | Sequence[int] | None = None) -> Any:
    """Return `value` with some legs summed against vectors, or against a train; nothing is conjugated.

    Parameters
    ----------
    value
        A TensorTrain; for vectors a Tucker or CP as well.
    other
        {leg: vector (n,)}, or a TensorTrain: with as many legs as `legs` names, the j-th of them meets leg legs[j];
        with as many as `value` has, legs of the same number meet, and both legs of the others stay.
    legs
        With a train: which legs are summed over, in ascending order.

    Returns
    -------
    TensorTrain | TTMatrix | Tucker | CP | float | complex
        Of the legs that are left, of the kind of `value`; a TTMatrix with those of `value` as rows and those of `other`
        as columns where both stay; a number where none is left. `contract(psi, psi.conj(), legs)` is a reduced density
        matrix.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If a leg does not exist, or does not have the size of what it meets.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ghz = tnlib.convert(tnlib.CP([0.5**0.5] * 2, [np.eye(2)] * 100), tnlib.TensorTrain)
    >>> tnlib.contract(ghz, {k: np.ones(2) for k in range(99)}).full().round(4)
    array([0.7071, 0.7071])
    >>> tnlib.contract(ghz, ghz.conj(), range(1, 100)).full().round(4)
    array([[0.5, 0. ],
           [0. , 0.5]])
    """
    if isinstance(other, Mapping):
        if legs is not None:
            raise ArgumentTypeError(
                f"contract: legs must be left out with vectors, got {legs!r}; the vectors name them."
            )
        return _against_vectors("contract", value, _as_vectors(value, other))
    as_train("contract", "value", value, TensorTrain)
    as_train("contract", "other", other, TensorTrain)
    if legs is None:
        raise ArgumentTypeError("contract: legs must name the legs to sum over, got None; pass for example (0, 1).")
    chosen = _as_legs("contract", legs, len(value.cores))
    if not chosen:
        raise ArgumentError("contract: legs must name at least one leg, got none; use tnlib.kron for the product.")
    return _against_train(value, other, chosen)


@own_threads
def sum_legs(value: Any, legs: int | Sequence[int] | None = None) -> Any:
    """Return `value` summed over some legs, or over all.

    Parameters
    ----------
    value
        A TensorTrain, Tucker or CP.
    legs
        Leg numbers; None for all, () for none. Negative ones count from the end.

    Returns
    -------
    TensorTrain | Tucker | CP | float | complex
        Of the legs that are left; a number where none is.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `value` is none of these, or a leg does not exist.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tt = tnlib.TensorTrain([np.ones((1, 2, 1))] * 50)
    >>> tnlib.sum_legs(tt) == 2.0**50, tnlib.sum_legs(tt, range(1, 50)).shape
    (True, (2,))
    """
    _as_summable("sum_legs", value)
    d = len(value.shape)
    chosen = list(range(d)) if legs is None else _as_legs("sum_legs", legs, d)
    return _against_vectors("sum_legs", value, {k: np.ones(value.shape[k], value.dtype) for k in chosen})


def _as_summable(function: str, value: Any) -> None:
    if not isinstance(value, TensorTrain | Tucker | CP):
        raise ArgumentTypeError(
            f"{function}: value must be a TensorTrain, Tucker or CP, got a {type(value).__name__}; "
            "make one of it with tnlib.convert."
        )


def _as_legs(function: str, legs: Any, d: int) -> list[int]:
    """Return distinct leg numbers from 0, ascending; all of them may be named."""
    given = list(legs) if is_list(legs) else [legs]
    if any(isinstance(k, bool) or not isinstance(k, int | np.integer) for k in given):
        raise ArgumentTypeError(f"{function}: legs must be leg numbers, got {legs!r}; pass for example legs=(0, 1).")
    if any(not -d <= k < d for k in given):
        raise ArgumentError(
            f"{function}: legs must lie between {-d} and {d - 1}, got {legs!r}; value has {so_many(d, 'leg')}."
        )
    found = [int(k) % d for k in given]
    if found != sorted(set(found)):
        raise ArgumentError(f"{function}: legs must be named once and in ascending order, got {legs!r}; sort them.")
    return found


def _as_vectors(value: Any, vectors: Mapping[Any, Any]) -> dict[int, Array]:
    _as_summable("contract", value)
    d, out = len(value.shape), {}
    for key, vector in vectors.items():
        (leg,) = _as_legs("contract", [key], d)
        a = as_array("contract", f"the vector of leg {leg}", vector, ndim=1)
        if len(a) != value.shape[leg]:
            raise ArgumentError(
                f"contract: the vector of leg {leg} must have shape ({value.shape[leg]},), got {a.shape}; "
                "it is summed against that leg."
            )
        if leg in out:
            raise ArgumentError(f"contract: leg {leg} must be named once, got it twice; drop one of the vectors.")
        out[leg] = a
    return out


def _number(function: str, x: Any, twos: int) -> float | complex:
    try:
        return as_scalar(x, twos)
    except OverflowError:
        raise ArgumentError(
            f"{function}: the result must lie below 1.8e308, got one beyond; lower the log_scale first."
        ) from None


def _against_vectors(function: str, value: Any, vectors: Mapping[int, Array]) -> Any:
    exponents = {k: exponent(v) for k, v in vectors.items()}
    vectors, aside = {k: shift(v, -exponents[k]) for k, v in vectors.items()}, sum(exponents.values())
    if isinstance(value, TensorTrain):
        cores, twos, factor = take_apart(value)
        parts = [np.tensordot(c, vectors[k], axes=([1], [0])) if k in vectors else c for k, c in enumerate(cores)]
        return _train_or_number(function, *absorb(parts), twos + aside, factor)  # l [n] r
    kept = [k for k in range(len(value.shape)) if k not in vectors]
    if isinstance(value, CP):
        weights = value.weights
        for k, v in vectors.items():
            weights = weights * (v @ value.factors[k])  # [n] R
        if not kept:
            return _number(function, weights.sum(), aside)
        return CP(shift(weights, aside), tuple(value.factors[k] for k in kept))
    core = value.core
    for k, v in vectors.items():
        core = mode_product(core, (v @ value.factors[k])[None], k)  # r0 ... 1 ...
    if not kept:
        return _number(function, core.reshape(-1)[0], aside)
    core = shift(core.reshape([core.shape[k] for k in kept]), aside)
    return Tucker(core, tuple(value.factors[k] for k in kept))


def _against_train(a: TensorTrain, b: TensorTrain, legs: list[int]) -> Any:
    d = len(a.cores)
    if len(b.cores) not in (len(legs), d):
        raise ArgumentError(
            f"contract: other must have {so_many(len(legs), 'leg')}, those summed over, or {d} like value, got "
            f"{len(b.cores)}; sum over what is too much first."
        )
    (cores, e, f), (others, g, h) = take_apart(a), take_apart(b)
    partners: list[Array | None] = list(others)
    if len(others) == len(legs) < d:
        met = iter(others)
        partners = [next(met) if k in legs else None for k in range(d)]
    for k in legs:
        n, m = cores[k].shape[1], partners[k].shape[1]  # type: ignore[union-attr]
        if n != m:
            raise ArgumentError(f"contract: leg {k} must have one size, got {n} and {m}; it is summed over.")
    left, more = sum_over_both(cores, partners, [k in legs for k in range(d)])
    return _train_or_number("contract", left, more, e + g, f * h)


def _train_or_number(function: str, cores: list[Array], more: int, twos: int, factor: float) -> Any:
    if cores[0].ndim == 2:
        return _number(function, cores[0][0, 0] * factor, more + twos)
    kind = TensorTrain if cores[0].ndim == 3 else TTMatrix
    return kind(tuple(cores), None, (more + twos) * math.log(2) + math.log(factor))
