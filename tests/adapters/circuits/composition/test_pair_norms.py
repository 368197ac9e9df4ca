"""Norms of the products of all pairs of matrices: left-out pairs, precision, nearly orthogonal pairs."""

import numpy as np
import pytest
from tnlib_adapters.circuits.composition.pair_norms import pair_norms


def test_pairs_with_the_same_and_later_layers_are_right():
    rng = np.random.default_rng(0)
    n_layers, heads, readers = 8, 2, 3
    u, v = rng.standard_normal((n_layers * heads, 4, 9)), rng.standard_normal((n_layers * readers, 5, 9))
    of_all = np.linalg.norm(u[:, None] @ v.swapaxes(1, 2), axis=(2, 3))
    np.testing.assert_allclose(pair_norms(u, v), of_all, rtol=1e-12)
    is_needed = np.arange(n_layers).repeat(heads)[:, None] <= np.arange(n_layers).repeat(readers)
    found = pair_norms(u, v, n_layers)
    np.testing.assert_allclose(found[is_needed], of_all[is_needed], rtol=1e-12)


@pytest.mark.parametrize("overlap", [1.0, 1e-1, 1e-2, 1e-3])
def test_nearly_orthogonal_pairs_keep_single_precision(overlap):
    rng = np.random.default_rng(1)
    q = np.linalg.qr(rng.standard_normal((96, 16)))[0].T
    u, v = q[:8], overlap * q[:8] + q[8:]
    single = pair_norms(u[None].astype(np.float32), v[None].astype(np.float32))
    np.testing.assert_allclose(single[0, 0], np.linalg.norm(u @ v.T), rtol=1e-6 + 1e-6 / overlap)
