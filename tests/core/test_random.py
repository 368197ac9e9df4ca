"""Random values: shapes, ranks, dtypes, variances, and the same numbers from the same seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest

import tnlib

MAKE = {
    "tensor_train": lambda **kw: tnlib.random.tensor_train((4, 5, 6), 3, **kw),
    "tt_matrix": lambda **kw: tnlib.random.tt_matrix((2, 3), (4, 5), 2, **kw),
    "tucker": lambda **kw: tnlib.random.tucker((4, 5, 6), (2, 3, 2), **kw),
    "cp": lambda **kw: tnlib.random.cp((4, 5, 6), 2, **kw),
    "low_rank": lambda **kw: tnlib.random.low_rank((4, 5), 2, **kw),
    "kronecker_terms": lambda **kw: tnlib.random.kronecker_terms((2, 3), (4, 5), 2, **kw),
}


def test_all_of_them_are_public() -> None:
    assert sorted(MAKE) == tnlib.random.__all__


@oracles.each_dtype
@pytest.mark.parametrize("name", MAKE)
def test_a_seed_gives_one_value_of_the_dtype(name: str, dtype: np.dtype) -> None:
    a, b = MAKE[name](dtype=dtype, rng=5), MAKE[name](dtype=dtype, rng=np.random.default_rng(5))
    assert a.dtype == dtype
    oracles.assert_same_bits(a, b)
    assert tnlib.distance(a, MAKE[name](dtype=dtype, rng=6)) > 0.1 * a.norm()
    oracles.assert_same_bits(MAKE[name](dtype=dtype), MAKE[name](dtype=dtype))


def test_ranks_are_those_asked_for_and_no_larger_than_the_legs_allow() -> None:
    assert tnlib.random.tensor_train((2, 3, 4, 2), 100).ranks == (1, 2, 6, 2, 1)
    assert tnlib.random.tensor_train((4, 4, 4), (2, 3)).ranks == (1, 2, 3, 1)
    assert tnlib.random.tt_matrix((2, 2), (3, 1), 9).ranks == (1, 2, 1)
    assert tnlib.random.tucker((4, 5), 2).ranks == (2, 2)
    assert tnlib.random.kronecker_terms((2, 3), (4, 5), 7).ranks == (7,)
    assert tnlib.random.kronecker_terms((2, 3), (4, 5), 1).left.shape == (1, 2, 4)


@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
def test_entries_of_trains_have_variance_one(dtype: Any) -> None:
    squares = [np.square(np.abs(tnlib.random.tensor_train((6, 7, 8), 5, dtype=dtype, rng=k).full())) for k in range(60)]
    assert 0.8 < np.mean(squares) < 1.25


REFUSED = [
    (
        lambda: tnlib.random.tensor_train((2**62, 3), 2),
        ["tensor_train: every stored array must fit", "lower its sizes"],
    ),
    (lambda: tnlib.random.tensor_train((4, 5, 6), (2, 2, 2)), ["tensor_train: rank must be one number or 2"]),
    (lambda: tnlib.random.low_rank((2, 3, 4), 2), ["low_rank: shape must be a pair", "tensor_train"]),
    (lambda: tnlib.random.kronecker_terms((2, 3, 4), (1, 1, 1), 2), ["kronecker_terms: row_shape", "tt_matrix"]),
    (lambda: tnlib.ones((2**62,)), ["ones: every stored array must fit into memory"]),
    (lambda: tnlib.eye((2**40,)), ["eye: every stored array must fit into memory"]),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_is_refused(call: Any, words: list[str]) -> None:
    with oracles.refused(ValueError, *words):
        call()
