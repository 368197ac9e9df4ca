"""Inner products of trains, with and without an operator between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib.formats.train.arguments import as_train
from tnlib.formats.train.format import TensorTrain, Train
from tnlib.formats.train.tt_matrix import TTMatrix, as_column, refuse_unequal_legs
from tnlib.linalg.scaling import Scaled


def inner_trains(a: Train, b: Train) -> Scaled:
    """Return the sum over all legs of conj(a) times b, from the left to the right."""
    carry = Scaled(np.ones((1, 1), np.result_type(a.dtype, b.dtype)), a.exponent + b.exponent)  # la lb
    for x, y in zip(a.fused().cores, b.fused().cores, strict=True):
        half = (carry.array @ y.reshape(len(y), -1)).reshape(-1, y.shape[2])  # (la n) [lb] rb
        carry = carry.update(x.reshape(-1, x.shape[2]).conj().T @ half)  # ra [(la n)] rb
    return carry


def inner_between(a: Any, operator: Any, b: Any) -> Scaled:
    """Return the inner product of `a` with `operator` times `b`; no array has both bonds of the product."""
    as_train("inner", "operator", operator, TTMatrix)
    as_train("inner", "a", a)
    as_train("inner", "b", b)
    if type(a) is not type(b):
        raise ArgumentTypeError(
            f"inner: a and b must be of one kind on both sides of an operator, got a {type(a).__name__} and a "
            f"{type(b).__name__}; make one of the other with tnlib.convert."
        )
    left, right = (as_column(t) if isinstance(t, TensorTrain) else t for t in (a, b))
    refuse_unequal_legs("inner, a and operator", left.T, operator)
    refuse_unequal_legs("inner, operator and b", operator, right)
    refuse_unequal_legs("inner, a and b", left, right.T)
    dtype = np.result_type(left.dtype, operator.dtype, right.dtype)
    carry = Scaled(np.ones((1, 1, 1), dtype), left.exponent + operator.exponent + right.exponent)  # la l lb
    for x, m, y in zip(left.cores, operator.cores, right.cores, strict=True):
        half = np.tensordot(carry.array, y, axes=([2], [0]))  # la l [lb] n p rb
        half = np.tensordot(half, m, axes=([1, 2], [0, 2]))  # la [l n] p rb m r
        grown = np.tensordot(x.conj(), half, axes=([0, 1, 2], [0, 3, 1]))  # [la m p] ra rb r
        carry = carry.update(grown.transpose(0, 2, 1))  # ra r rb
    return carry
