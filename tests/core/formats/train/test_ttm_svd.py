"""ttm_svd: leg order, ranks, the contract, shapes that do not fit."""

from __future__ import annotations

import functools

import numpy as np
import oracles
import pytest

import tnlib

SHAPES = [((2, 3), (4, 5)), ((2, 3, 2), (3, 1, 4)), ((6,), (5,)), ((1, 4), (3, 2)), ((2,) * 5, (2,) * 5)]


@oracles.each_dtype
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=str)
def test_exact_without_a_tolerance(dtype: np.dtype, rows: tuple, columns: tuple) -> None:
    a = oracles.normal((int(np.prod(rows)), int(np.prod(columns))), dtype)
    fit = tnlib.ttm_svd(a, rows, columns)
    oracles.assert_fit(fit, a)
    oracles.assert_gauge(fit.value)
    oracles.assert_close(fit.value.full(), a, dtype, factor=200)
    oracles.assert_close(oracles.contract(fit.value), a, dtype, factor=200)
    assert (fit.value.row_shape, fit.value.col_shape) == (rows, columns)


def test_a_kronecker_product_has_rank_one_and_its_factors_as_cores() -> None:
    factors = [oracles.normal((m, n), seed=m + n) for m, n in [(2, 3), (4, 2), (3, 5)]]
    a = functools.reduce(np.kron, factors)
    value = tnlib.ttm_svd(a, (2, 4, 3), (3, 2, 5)).value
    assert value.ranks == (1, 1, 1, 1)
    for core, factor in zip(value.cores, factors, strict=True):
        cosine = np.vdot(core[0, :, :, 0], factor) / (np.linalg.norm(core) * np.linalg.norm(factor))
        assert abs(cosine) == pytest.approx(1, rel=1e-13)


@oracles.each_dtype
def test_ranks_of_a_sum_of_kronecker_products_are_found(dtype: np.dtype) -> None:
    terms = oracles.normal((3, 4, 5), dtype), oracles.normal((3, 6, 2), dtype, seed=1)
    a = sum(np.kron(x, y) for x, y in zip(*terms, strict=True))
    assert tnlib.ttm_svd(a, (4, 6), (5, 2)).value.ranks == (1, 3, 1)


@pytest.mark.parametrize("rtol", [1e-12, 1e-6, 1e-2, 0.3])
def test_a_smooth_matrix(rtol: float) -> None:
    i = np.arange(64.0)
    a = 1 / (1 + np.abs(i[:, None] - i))
    fit = tnlib.ttm_svd(a, (4, 4, 4), (4, 4, 4), rtol=rtol)
    oracles.assert_fit(fit, a, rtol=rtol)
    assert fit.value.n_parameters < a.size


def test_the_identity_has_rank_one() -> None:
    fit = tnlib.ttm_svd(np.eye(32), (2,) * 5, (2,) * 5)
    assert fit.value.ranks == (1,) * 6
    assert fit.notes == ()


@pytest.mark.parametrize(
    ("rows", "columns", "kind", "words"),
    [
        ((2, 2), (2, 3), ValueError, ["row_shape must multiply to 6", "(2, 2)", "4"]),
        ((2, 3), (2, 3), ValueError, ["col_shape must multiply to 4", "(2, 3)", "6"]),
        ((6,), (2, 2), ValueError, ["row_shape and col_shape", "(6,)", "(2, 2)", "legs of size 1"]),
        ((), (4,), ValueError, ["row_shape must name at least one leg"]),
        ((-2, -3), (2, 2), ValueError, ["row_shape must be at least 1", "-2"]),
        (6, (4,), TypeError, ["row_shape must be a sequence", "6"]),
        ("23", (2, 2), TypeError, ["row_shape must be a sequence", "'23'"]),
        ((2, 3), None, TypeError, ["col_shape must be a sequence", "None"]),
        ((2.0, 3), (2, 2), TypeError, ["row_shape must be an integer", "2.0"]),
        (np.array(6), (4,), TypeError, ["row_shape must be a sequence"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(rows: object, columns: object, kind: type[Exception], words: list) -> None:
    with oracles.refused(kind, "ttm_svd: ", "got", *words):
        tnlib.ttm_svd(np.ones((6, 4)), rows, columns)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 4)])
def test_only_matrices_are_taken(shape: tuple[int, ...]) -> None:
    with oracles.refused(ValueError, "ttm_svd: a must have 2 legs", str(shape)):
        tnlib.ttm_svd(np.ones(shape), (2, 3), (2, 2))
