"""LowRank: products, sums, norms and outer products are those of the dense matrices."""

from __future__ import annotations

import numpy as np
import oracles
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
        (a.real, x.real),
        (a.imag, x.imag),
        (tnlib.kron(a, b), np.kron(x, y)),
        (tnlib.outer(a, b), np.multiply.outer(x, y)),
    ):
        assert oracles.norm(oracles.wide(got.full()) - want) <= 2 * slack + slack * (got.shape != a.shape)
    assert abs(a.norm() - oracles.norm(x)) <= slack
    assert (a @ b.H).ranks == (min(r, s),)
