"""Components of a matrix: the best of every rank in what it reads and matters to, and the matrix all together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tnlib_adapters.compression.methods.components import (
    components,
    components_in_single_precision,
)


def loss(change: np.ndarray, x: np.ndarray, p: np.ndarray) -> float:
    """Square of x change p over all pairs: what the moments take for the cost of a change."""
    return float(np.linalg.norm(x @ change @ p.T)) ** 2


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32 - 1), st.data())
@settings(deadline=None)
def test_no_other_matrix_of_the_rank_costs_less(m, n, seed, data):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((m, n))
    x, p = (rng.standard_normal((30, k)) * 10.0 ** rng.uniform(-2, 2, k) for k in (m, n))
    found = components(w, x.T @ x, p.T @ p)
    size = np.linalg.norm(w)
    assert np.linalg.norm(found.left @ found.right - w) <= 1e-9 * size
    assert np.all(np.diff(found.lost) <= 0)
    r = data.draw(st.integers(0, min(m, n)))
    best = loss(found.left[:, :r] @ found.right[:r] - w, x, p)
    whole = loss(w, x, p)
    assert abs(best - found.lost[r] * whole) <= 1e-6 * whole
    for _ in range(5):
        other = rng.standard_normal((m, r)) @ rng.standard_normal((r, n))
        assert best <= loss(other - w, x, p) + 1e-6 * whole
    near = (found.left[:, :r] * (1 + 0.1 * rng.standard_normal((m, r)))) @ found.right[:r]
    assert best <= loss(near - w, x, p) + 1e-6 * whole


@pytest.mark.parametrize("shape", [(5, 4), (4, 5)])
def test_without_a_text_they_are_singular(shape):
    w = np.random.default_rng(0).standard_normal(shape)
    found, s = components(w), np.linalg.svd(w, compute_uv=False)
    np.testing.assert_allclose(found.losses, s**2 / np.sum(s**2), rtol=1e-9)


@pytest.mark.parametrize("seen", [0, 1, 2])
@pytest.mark.parametrize("shape", [(6, 5), (5, 6)])
def test_directions_that_no_text_reaches_are_lost_first_and_kept_at_full_rank(seen, shape):
    rng = np.random.default_rng(0)
    m, n = shape
    w = rng.standard_normal(shape)
    x, p = rng.standard_normal((30, seen)) @ rng.standard_normal((seen, m)), rng.standard_normal((30, n))
    found = components(w, x.T @ x, p.T @ p)
    np.testing.assert_allclose(found.left @ found.right, w, atol=1e-5)
    assert loss(found.left[:, :seen] @ found.right[:seen] - w, x, p) <= 1e-6 * max(1.0, loss(w, x, p))


def test_a_diagonal_stands_for_its_matrix():
    rng = np.random.default_rng(0)
    w, counts, p = rng.standard_normal((9, 4)), np.arange(9.0), rng.standard_normal((30, 4))
    one, other = (components(w, reads, p.T @ p) for reads in (counts, np.diag(counts)))
    np.testing.assert_allclose(one.left[:, :2] @ one.right[:2], other.left[:, :2] @ other.right[:2], atol=1e-10)


@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_the_scale_of_moments_is_of_no_account(scale):
    rng = np.random.default_rng(0)
    w, x, p = rng.standard_normal((5, 5)), rng.standard_normal((30, 5)), rng.standard_normal((30, 5))
    one, other = components(w, x.T @ x, p.T @ p), components(w, x.T @ x, scale * (p.T @ p))
    np.testing.assert_allclose(one.left[:, :2] @ one.right[:2], other.left[:, :2] @ other.right[:2], rtol=1e-6)


def moments_of(rng: np.random.Generator, n: int, rank: int, scale: float) -> np.ndarray:
    x = scale * rng.standard_normal((rank, n)) * 10.0 ** -np.linspace(0, 2, n)
    return (x.T @ x).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-10, 1.0, 1e10]),
    singular=st.booleans(),
)
def test_every_rank_loses_what_it_loses_in_double_precision(m, n, seed, scale, singular):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((m, n)).astype(np.float32)
    reads, slopes = (moments_of(rng, k, max(1, k // 2) if singular else 2 * k, scale) for k in (m, n))
    found = components_in_single_precision(weight, reads, slopes, torch.device("cpu"))
    exact = components(weight, reads, slopes)
    assert found.left.dtype == found.right.dtype == weight.dtype
    scales = reads / np.trace(reads), slopes / np.trace(slopes)

    def error(own, rank) -> float:
        change = (own.left[:, :rank].astype(np.float64) @ own.right[:rank] - weight).astype(np.float64)
        return float(np.sqrt(max(0.0, np.trace(scales[0] @ change @ scales[1] @ change.T))))

    for rank in range(min(m, n) + 1):
        assert error(found, rank) <= error(exact, rank) + 1e-3 * error(exact, 0)
    np.testing.assert_allclose(found.losses, exact.losses, atol=1e-4)
    assert np.all(np.diff(found.losses) <= 0)
