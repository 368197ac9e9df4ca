"""LowRank: products, sums and norms are those of the dense matrices, and the balanced split."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from gauge_changes import assert_alike, invertible, real, scales
from hypothesis import given
from hypothesis import strategies as st

import tnlib

small = st.integers(1, 6)


@given(small, small, small, small, st.sampled_from(oracles.DTYPES), st.integers(0, 99))
def test_algebra(m: int, n: int, r: int, s: int, dtype: np.dtype, seed: int) -> None:
    a = tnlib.random.low_rank((m, n), r, dtype=dtype, rng=seed)
    b = tnlib.random.low_rank((m, n), s, dtype=dtype, rng=seed + 1)
    x, y = oracles.wide(a.full()), oracles.wide(b.full())
    slack = (
        64
        * oracles.eps(dtype)
        * (oracles.norm(a.left) * oracles.norm(a.right))
        * (1 + oracles.norm(b.left) * oracles.norm(b.right))
    )
    for got, want in (
        (a.T, x.T),
        (a.H, x.conj().T),
        (a + b, x + y),
        (a - 2 * b, x - 2 * y),
        (a @ b.H, x @ y.conj().T),
    ):
        assert oracles.norm(oracles.wide(got.full()) - want) <= 2 * slack
    assert abs(a.norm() - oracles.norm(x)) <= slack
    assert (a @ b.H).ranks == (min(r, s),)


@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 5),
    st.sampled_from(oracles.DTYPES),
    st.integers(0, 999),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.integers(0, 2),
)
def test_a_product_is_balanced(m: int, n: int, r: int, dtype: np.dtype, seed: int, power: float, scale: int) -> None:
    c = real(dtype).type(scales(dtype)[scale])
    left, right = oracles.normal((m, r), dtype, seed), oracles.normal((r, n), dtype, seed + 1)
    dense = oracles.wide(left) @ oracles.wide(right)
    given_ = tnlib.LowRank(left * c, right / c)
    with oracles.unchanged(*given_.arrays()):
        fixed = tnlib.balance(given_, power=power)
    assert fixed.dtype == dtype
    size = np.linalg.norm(left, 2) * np.linalg.norm(right, 2)
    tolerance = 100 * oracles.eps(dtype) * size
    assert oracles.norm(oracles.wide(fixed.full()) - dense) <= tolerance
    assert fixed.ranks == (max(1, np.linalg.matrix_rank(dense, tol=tolerance)),)
    s = np.linalg.svd(dense, compute_uv=False)[: fixed.ranks[0]]
    left_gram = oracles.wide(fixed.left.conj().T @ fixed.left)
    right_gram = oracles.wide(fixed.right @ fixed.right.conj().T)
    relative = 100 * oracles.eps(dtype) * size / s[-1]  # how well the smallest value is known
    assert oracles.norm(left_gram - np.diag(s ** (2 * power))) <= 3 * relative * np.linalg.norm(s ** (2 * power))
    assert oracles.norm(right_gram - np.diag(s ** (2 - 2 * power))) <= 3 * relative * np.linalg.norm(
        s ** (2 - 2 * power)
    )
    oracles.assert_signs(fixed.left)


@oracles.each_dtype
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("spectrum", [(5, 4, 3, 2), (2, 2, 1, 1), (1, 1, 1, 1), (3, 1e-2, 1e-2, 1e-2)], ids=str)
def test_any_split_of_a_product_comes_out_the_same(dtype: np.dtype, power: float, spectrum: Any) -> None:
    u, v = oracles.isometry(9, 4, dtype, 1), oracles.isometry(8, 4, dtype, 2)
    left, right = u * spectrum, v.conj().T
    one = tnlib.balance(tnlib.LowRank(left.astype(dtype), right.astype(dtype)), power=power)
    condition = spectrum[0] / spectrum[-1]
    for seed in range(4):
        g = invertible(4, dtype, seed)
        other = tnlib.LowRank((left @ g).astype(dtype), (np.linalg.inv(g) @ right).astype(dtype))
        assert_alike(tnlib.balance(other, power=power), one, 3e3 * condition)
        more = np.concatenate([other.left, other.left[:, :2]], axis=1)  # a rank too many
        fewer = np.concatenate([other.right, 0 * other.right[:2]])
        assert_alike(tnlib.balance(tnlib.LowRank(more, fewer), power=power), one, 3e3 * condition)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_sides_and_terms_of_any_scale(power: float) -> None:
    left, right = oracles.normal((6, 3)), oracles.normal((3, 5))
    one = tnlib.balance(tnlib.LowRank(left, right), power=power)
    for columns in (np.full(3, 1e200), np.full(3, 1e-200), np.array([1e200, 1.0, 1e-200])):
        other = tnlib.LowRank(left * columns, right / columns[:, None])
        assert_alike(tnlib.balance(other, power=power), one, 1e3)
    # the scale of the product itself: it goes where the power says
    large = tnlib.balance(tnlib.LowRank(1e150 * left, 1e50 * right), power=power)
    oracles.assert_close(large.left / 1e200**power, one.left, factor=1e3)
    oracles.assert_close(large.right / 1e200 ** (1 - power), one.right, factor=1e3)


def test_the_balanced_split_has_the_smallest_squares() -> None:
    value = tnlib.LowRank(oracles.normal((7, 3)), oracles.normal((3, 6), seed=1))
    fixed = tnlib.balance(value)
    least = sum(np.linalg.norm(a) ** 2 for a in fixed.arrays())
    assert least == pytest.approx(2 * np.linalg.svd(value.full(), compute_uv=False).sum(), rel=1e-12)
    for seed in range(20):
        g = np.eye(3) + 0.1 * oracles.normal((3, 3), seed=seed)
        assert np.linalg.norm(fixed.left @ g) ** 2 + np.linalg.norm(np.linalg.inv(g) @ fixed.right) ** 2 >= least
    assert_alike(tnlib.canonical_form(value), fixed, 1)


def test_matrices_that_share_one_side_are_one_stacked() -> None:
    """One G for several A's against one B: grouped heads."""
    stack, right = oracles.normal((4, 9, 3)), oracles.normal((3, 8), seed=9)
    one = tnlib.balance(tnlib.LowRank(stack.reshape(36, 3), right))
    g = invertible(3, float, 3)
    other = tnlib.balance(tnlib.LowRank((stack @ g).reshape(36, 3), np.linalg.inv(g) @ right))
    assert_alike(other, one, 1e4)
    for a, fixed in zip(stack, one.left.reshape(4, 9, 3), strict=True):
        oracles.assert_close(fixed @ one.right, a @ right, factor=1e3)


def test_a_product_that_could_not_be_formed() -> None:
    value = tnlib.LowRank(oracles.normal((1_000_000, 2)), oracles.normal((2, 1_000_000), seed=1))
    assert tnlib.balance(value).norm() == pytest.approx(value.norm(), rel=1e-12)


def test_zeros_have_a_gauge() -> None:
    for power in (0.0, 0.5, 1.0):
        low = tnlib.balance(tnlib.LowRank(np.ones((3, 2)), np.zeros((2, 4))), power=power)
        assert low.ranks == (1,)
        assert not low.full().any()


def test_what_is_wrong_is_said() -> None:
    with oracles.refused(TypeError, "balance", "LowRank", "SVD"):
        tnlib.balance(tnlib.svd(np.eye(2)).value)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "balance", "LowRank", "Fit", "pass fit.value"):
        tnlib.balance(tnlib.svd(np.eye(2)))  # type: ignore[arg-type]
    low = tnlib.LowRank(np.full((2, 1), 1e200), np.full((1, 2), 1e200))
    assert tnlib.balance(low).left[0, 0] == pytest.approx(1e200, rel=1e-12)
    with oracles.refused(ValueError, "left", "finite"):
        tnlib.balance(low, power=1)
    for wrong in (-0.5, 2, np.nan):
        with oracles.refused(ValueError, "balance", "power", "between 0 and 1"):
            tnlib.balance(low, power=wrong)
    with oracles.refused(TypeError, "balance", "power", "'left'"):
        tnlib.balance(low, power="left")  # type: ignore[arg-type]
