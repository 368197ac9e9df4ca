"""What the moments say of a truncation: the best of its rank in their metric, and exact at full rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tnlib_adapters.compression.moments import Moments


def moments_of(a: np.ndarray, p: np.ndarray) -> Moments:
    found = Moments.zeros(1, a.shape[1])
    found.activations["qk"] += a.T @ a
    found.gradients["qk"] += p.T @ p
    return found


def loss(t: np.ndarray, a: np.ndarray, p: np.ndarray) -> float:
    """Mean square of a (t - 1) p over all pairs: what the moments take for the cost of t."""
    return float(np.linalg.norm(a @ (t - np.eye(len(t))) @ p.T))


@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.data())
@settings(deadline=None)
def test_no_other_truncation_of_the_rank_costs_less(d, seed, data):
    rng = np.random.default_rng(seed)
    a, p = (rng.standard_normal((20, d)) * 10.0 ** rng.uniform(-2, 2, d) for _ in range(2))
    left, right = (side[0] for side in moments_of(a, p).components("qk"))
    np.testing.assert_allclose(left @ right.T, np.eye(d), atol=1e-8)
    r = data.draw(st.integers(0, d))
    best = loss(left[:, :r] @ right[:, :r].T, a, p)
    for _ in range(5):
        other = rng.standard_normal((d, r)) @ rng.standard_normal((r, d))
        assert best <= loss(other, a, p) * (1 + 1e-6)
    near = (left[:, :r] + 0.1 * rng.standard_normal((d, r)) * np.abs(left).mean()) @ right[:, :r].T
    assert best <= loss(near, a, p) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_directions_that_no_text_reaches_are_cut_first_and_kept_at_full_rank(rank):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((30, rank)) @ rng.standard_normal((rank, 5))
    p = rng.standard_normal((30, 5))
    left, right = (side[0] for side in moments_of(a, p).components("qk"))
    np.testing.assert_allclose(left @ right.T, np.eye(5), atol=1e-6)
    # the floor of unseen directions is 1e-9 of the largest moment
    assert loss(left[:, :rank] @ right[:, :rank].T, a, p) <= 1e-3 * np.linalg.norm(a) * np.linalg.norm(p)


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_the_scale_of_gradients_is_of_no_account(scale):
    rng = np.random.default_rng(0)
    a, p = rng.standard_normal((2, 30, 5))
    one, other = moments_of(a, p).components("qk"), moments_of(a, p * np.sqrt(scale)).components("qk")
    np.testing.assert_allclose(
        one[0][0] @ np.diag([1, 1, 0, 0, 0]) @ one[1][0].T,
        other[0][0] @ np.diag([1, 1, 0, 0, 0]) @ other[1][0].T,
        rtol=1e-6,
    )
