"""The freedom Q G, K G^-T of trained heads is that of a product, and `balance` leaves none of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import oracles
import pytest
import tnlib_adapters
from tnlib_adapters.attention.head_gauge import balance_terms

import tnlib


@pytest.fixture(params=["builtin", "minilm"])
def layer(request: pytest.FixtureRequest) -> tnlib_adapters.Attention:
    """The first layer of a trained model."""
    folder: Path = (
        tnlib_adapters.builtin_path() if request.param == "builtin" else request.getfixturevalue("minilm_path")
    )
    return tnlib_adapters.open_checkpoint(folder).attention(0)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_queries_and_keys_in_any_basis_of_the_head(layer: tnlib_adapters.Attention, power: float) -> None:
    for head in (0, layer.n_heads - 1):
        form = layer.qk(head)
        left, right = oracles.wide(form.left), oracles.wide(form.right)
        one = tnlib.balance(tnlib.LowRank(left, right), power=power)
        s = np.linalg.svd(np.linalg.qr(left)[1] @ np.linalg.qr(right.T)[1].T, compute_uv=False)
        s = s[: one.ranks[0]]
        gaps = -np.diff(s, append=0.0)
        for seed in range(3):
            rank = left.shape[1]
            g = oracles.with_spectrum(np.geomspace(10, 1, rank), rank, rank, seed=seed)
            other = tnlib.balance(tnlib.LowRank(left @ g, np.linalg.inv(g) @ right), power=power)
            oracles.assert_close(other.left @ other.right, one.left @ one.right, factor=1e4)
            # vectors are known as well as the gap to the next value tells them apart
            allowed = 1e4 * oracles.eps(float) * s[0] / gaps.min()
            assert allowed < 1e-6
            for a, b in zip(other.arrays(), one.arrays(), strict=True):
                assert oracles.norm(a - b) <= allowed * oracles.norm(b)


def test_heads_that_share_their_keys_share_one_basis() -> None:
    """Grouped heads: one G for all queries of a key, which `qk_group` stacks."""
    w = oracles.normal((4, 4, 10, 3))
    layer = tnlib_adapters.Attention(w[0], w[1, :2], w[2, :2], w[3].transpose(0, 2, 1), scale=1.0)
    g = oracles.with_spectrum([4, 2, 1], 3, 3, seed=7)
    turned = w[0].copy(), w[1, :2].copy()
    turned[0][:2] = w[0, :2] @ g
    turned[1][0] = w[1, 0] @ np.linalg.inv(g).T
    other = tnlib_adapters.Attention(*turned, w[2, :2], w[3].transpose(0, 2, 1), scale=1.0)
    one, same = (tnlib.balance(a.qk_group(0)) for a in (layer, other))
    for a, b in zip(one.arrays(), same.arrays(), strict=True):
        oracles.assert_close(a, b, factor=1e4)
    apart = tnlib.balance(layer.qk(0)).right
    assert oracles.norm(apart - one.right) > 0.1  # one head alone has a basis of its own


def test_under_rotary_every_frequency_has_a_number_of_its_own() -> None:
    """Scores Re sum_f (x Q)_f conj(y K)_f exp(i theta_f distance) leave one complex scaling of each plane."""
    q, k = oracles.normal((9, 4), complex), oracles.normal((9, 4), complex, seed=1)
    scaling = oracles.normal((4,), complex, seed=2)
    theta = 0.5 ** np.arange(4)

    def scores(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        turns = np.exp(1j * np.multiply.outer(np.arange(5), theta))
        return np.einsum("if,df,fj->dij", left, turns, right).real

    one = balance_terms(q, k.conj().T)
    same = balance_terms(q * scaling, (k / scaling.conj()).conj().T)
    for a, b in zip(one, same, strict=True):
        oracles.assert_close(a, b, factor=100)
    oracles.assert_close(scores(*one), scores(q, k.conj().T), factor=100)


@oracles.each_dtype
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_terms_are_balanced_one_by_one(dtype: np.dtype, power: float) -> None:
    real = np.finfo(dtype).dtype
    left, right = oracles.normal((6, 4), dtype), oracles.normal((4, 5), dtype, 1)
    left[:, 3] = 0
    one = balance_terms(left, right, power)
    for scale, seed in itertools.product([1e-15, 1.0, 1e15] if real == np.float32 else [1e-150, 1.0, 1e150], range(3)):
        d = oracles.normal((4,), dtype, seed) * real.type(scale)
        for a, b in zip(balance_terms(left * d, right / d[:, None], power), one, strict=True):
            assert a.dtype == dtype
            oracles.assert_close(a, b, dtype, 200)
    a, b = one
    for j in range(3):
        oracles.assert_close(np.outer(a[:, j], b[j]), np.outer(left[:, j], right[j]), dtype)
        s = np.linalg.norm(left[:, j]) * np.linalg.norm(right[j])
        assert np.linalg.norm(a[:, j]) == pytest.approx(s**power, rel=100 * oracles.eps(dtype))
    oracles.assert_signs(a[:, :3])
    assert not a[:, 3].any()
    assert not b[3].any()
