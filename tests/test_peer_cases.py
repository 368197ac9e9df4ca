"""Cases from tests and tutorials of other libraries that version 0.2.0 could not express; comments name the library.

Those of methods that tnlib does not have are in `test_hand_overs`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import tnlib

pytestmark = pytest.mark.slow


def _train(shape: tuple[int, ...] = (4, 5, 6), rank: int = 3, seed: int = 0) -> tnlib.TensorTrain:
    return tnlib.random.tensor_train(shape, rank, rng=seed)


def _state(d: int = 8, rank: int = 4) -> tnlib.TensorTrain:
    psi = _train((2,) * d, rank)
    return psi / psi.norm()


# ---- crosses


def test_a_cap_on_the_ranks() -> None:  # TensorCrossInterpolation
    fit = tnlib.tt_cross(lambda p: np.exp(-p.sum(axis=1) / 10) + 1 / (1 + p.sum(axis=1)), (10,) * 5, rtol=1, max_rank=1)
    assert fit.value.ranks == (1,) * 6


def test_a_hundred_boxes_at_known_positions() -> None:  # TensorCrossInterpolation
    places = np.random.default_rng(0).integers(0, 2, (100, 40))

    def f(points: np.ndarray) -> np.ndarray:
        return (points[:, None, :30] == places[None, :, :30]).all(axis=2).sum(axis=1).astype(float)

    fit = tnlib.tt_cross(f, (2,) * 40, rtol=1e-6, pivots=places)
    np.testing.assert_allclose(tnlib.entries(fit.value, places), f(places), atol=1e-6)


def test_a_spike_at_a_known_position() -> None:  # TensorCrossInterpolation
    spike = np.arange(40)[None] % 2
    fit = tnlib.tt_cross(lambda p: (p == spike).all(axis=1) * 1.0, (2,) * 40, rtol=1e-6, pivots=spike)
    assert fit.value[tuple(spike[0])] == pytest.approx(1)


def test_a_matrix_at_rank_five() -> None:  # TensorCrossInterpolation
    a = np.random.default_rng(0).standard_normal((30, 20)) @ np.diag(0.5 ** np.arange(20))
    with pytest.warns(tnlib.ConvergenceWarning, match="max_rank=5"):
        fit = tnlib.tt_cross(lambda p: a[tuple(p.T)], a.shape, rtol=1e-9, max_rank=5)
    assert fit.value.ranks == (1, 5, 1)


def test_a_callback_that_stops_a_cross() -> None:  # teneva
    seen: list[int] = []

    def stop(fit: tnlib.Fit) -> None:
        seen.append(fit.n_calls)
        raise StopIteration

    with pytest.warns(tnlib.ConvergenceWarning):
        tnlib.tt_cross(lambda p: 1 / (1 + p.sum(axis=1)), (20,) * 4, rtol=1e-9, callback=stop)
    assert len(seen) == 1


def test_the_number_of_evaluations() -> None:  # teneva
    seen: list[int] = []

    def f(points: np.ndarray) -> np.ndarray:
        seen.append(len(points))
        return 1 / (1 + points.sum(axis=1))

    assert tnlib.tt_cross(f, (20,) * 4, rtol=1e-6).n_calls == sum(seen)


def test_prescribed_ranks_of_a_cross() -> None:  # tensorly
    exact = _train((3,) * 6, 4)
    fit = tnlib.tt_cross(lambda p: tnlib.entries(exact, p), exact.shape, rtol=1e-9)
    assert tnlib.round(fit.value, max_rank=(2, 2, 3, 2, 2)).value.ranks == (1, 2, 2, 3, 2, 2, 1)


# ---- trains


def test_permuted_legs() -> None:  # torchTT
    t = _train()
    np.testing.assert_allclose(tnlib.permute(t, (2, 0, 1)).full(), t.full().transpose(2, 0, 1), atol=1e-12)


def test_broadcasting() -> None:  # torchTT
    t, u = _train(), _train((5, 6), 2, 1)
    np.testing.assert_allclose((t + tnlib.outer(tnlib.ones((4,)), u)).full(), t.full() + u.full(), atol=1e-12)


def test_binary_digits_and_back() -> None:  # torchTT
    t = _train((8, 16), 3)
    bits = tnlib.reshape(t, (2,) * 7)
    np.testing.assert_allclose(bits.full(), t.full().reshape((2,) * 7), atol=1e-12)
    np.testing.assert_allclose(tnlib.reshape(bits, (8, 16)).full(), t.full(), atol=1e-12)


def test_a_reshaped_operator() -> None:  # torchTT
    a = tnlib.random.tt_matrix((4, 6), (4, 9), 3, rng=0)
    split = tnlib.reshape(a, ((2, 2, 2, 3), (2, 2, 3, 3)))
    np.testing.assert_allclose(split.full(), a.full(), atol=1e-12)


def test_padding() -> None:  # torchTT
    t = _train()
    padded = tnlib.concatenate([t, tnlib.zeros((4, 2, 6))], axis=1)
    np.testing.assert_allclose(padded.full(), np.pad(t.full(), ((0, 0), (0, 2), (0, 0))), atol=1e-12)


def test_the_diagonal_of_an_operator_and_back() -> None:  # torchTT
    t = _train()
    np.testing.assert_allclose(tnlib.diag(t).full(), np.diag(t.full().ravel()), atol=1e-12)
    np.testing.assert_allclose(tnlib.diag(tnlib.diag(t)).full(), t.full(), atol=1e-12)


def test_one_entry_set() -> None:  # tntorch
    t, i = _train(), (1, 2, 3)
    unit = tnlib.product_state([np.eye(n)[k] for n, k in zip(t.shape, i, strict=True)])
    want = t.full()
    want[i] = 7
    np.testing.assert_allclose((t + (7 - t[i]) * unit).full(), want, atol=1e-12)


def test_a_train_through_two_values() -> None:  # TensorCrossInterpolation
    shape, points, values = (4, 4, 4), [(0, 1, 2), (3, 2, 1)], [1.0, -2.0]
    units = [tnlib.product_state([np.eye(n)[k] for n, k in zip(shape, i, strict=True)]) for i in points]
    found = values[0] * units[0] + values[1] * units[1]
    np.testing.assert_allclose(tnlib.entries(found, points), values)


def test_interface_vectors_and_the_gradient_of_an_entry() -> None:  # teneva
    t, i, k, step = _train(), (1, 2, 3), 1, 1e-6
    matrices = [core[:, n] for core, n in zip(t.cores, i, strict=True)]
    left = functools.reduce(np.matmul, matrices[:k], np.eye(1))[0]
    right = functools.reduce(np.matmul, [*matrices[k + 1 :], np.eye(1)])[:, 0]
    gradient = np.multiply.outer(left, right) * np.exp(t.log_scale)
    for place in np.ndindex(gradient.shape):
        core = t.cores[k].copy()
        core[place[0], i[k], place[1]] += step
        other = tnlib.TensorTrain([*t.cores[:k], core, *t.cores[k + 1 :]], log_scale=t.log_scale)
        assert (other[i] - t[i]) / step == pytest.approx(gradient[place], abs=1e-6)


def test_a_batch_of_trains() -> None:  # tntorch
    batch = np.random.default_rng(0).standard_normal((3, 4, 5, 6))
    trains = [tnlib.tt_svd(x).value for x in batch]
    np.testing.assert_allclose(np.stack([t.full() for t in trains]), batch, atol=1e-12)


# ---- physics


def test_an_operator_on_three_distant_sites() -> None:  # quimb
    psi, gate = _state(6), np.random.default_rng(0).standard_normal((8, 8))
    found = tnlib.apply(tnlib.embed(gate, (4, 1, 3), psi.shape), psi).value.full()
    want = np.tensordot(gate.reshape((2,) * 6), psi.full(), ([3, 4, 5], [4, 1, 3]))
    np.testing.assert_allclose(found, np.moveaxis(want, [0, 1, 2], [4, 1, 3]), atol=1e-12)


def test_a_gate_with_two_controls() -> None:  # quimb
    toffoli = np.eye(8)[[0, 1, 2, 3, 4, 5, 7, 6]]
    start = tnlib.product_state(np.eye(2)[[1, 0, 1, 0, 0]])
    turned = tnlib.apply(tnlib.embed(toffoli, (0, 2, 4), start.shape), start).value
    assert turned[1, 0, 1, 0, 1] == pytest.approx(1)


def test_permuted_sites() -> None:  # TeNPy
    psi = _state(6)
    np.testing.assert_allclose(tnlib.permute(psi, range(5, -1, -1)).full(), psi.full().T, atol=1e-12)


def test_a_segment_with_open_ends() -> None:  # TeNPy
    psi = tnlib.canonicalize(_state(), 3)
    cores = psi.cores[2:6]
    ends = np.eye(len(cores[0]))[None], np.eye(cores[-1].shape[2])[..., None]
    segment = tnlib.TensorTrain([ends[0], *cores, ends[1]], center=2)
    assert tnlib.entropy(segment, 2) == pytest.approx(tnlib.entropy(psi, 3))


# ---- Tucker and CP


def test_tucker_from_given_factors() -> None:  # tensorly
    x = np.random.default_rng(0).standard_normal((6, 7, 8))
    first = tnlib.tucker(x, ranks=3).value
    assert tnlib.tucker(x, init=first, n_iter=20).error <= tnlib.tucker(x, ranks=3).error


def _masked() -> tuple[np.ndarray, Any]:
    rng = np.random.default_rng(0)
    x = np.einsum("ir,jr,kr->ijk", *(rng.standard_normal((12, 3)) for _ in range(3)))
    return x, np.ma.array(x, mask=rng.random(x.shape) < 0.3)


def test_tucker_of_known_entries() -> None:  # tensorly
    x, masked = _masked()
    fit = tnlib.tucker(masked, max_rank=3, n_iter=500)
    assert np.linalg.norm(fit.value.full() - x) < 1e-3 * np.linalg.norm(x)


def test_cp_of_known_entries() -> None:  # tensorly
    x, masked = _masked()
    assert np.linalg.norm(tnlib.cp(masked, 3, n_starts=3).value.full() - x) < 1e-3 * np.linalg.norm(x)


def test_cp_from_given_factors() -> None:  # tensorly
    x, _ = _masked()
    with pytest.warns(tnlib.ConvergenceWarning):
        first = tnlib.cp(x, 3, n_iter=2).value
    assert tnlib.cp(x, 3, init=first).error < 1e-6


def test_complex_cp_of_a_higher_rank() -> None:  # tensorly
    rng = np.random.default_rng(1234)
    factors = [rng.standard_normal((n, 3)) + 1j * rng.standard_normal((n, 3)) for n in (3, 4, 2)]
    x = np.einsum("ir,jr,kr->ijk", *factors)
    assert tnlib.cp(x, 4, n_starts=5).error < 1e-2


def test_a_tucker_times_a_matrix() -> None:  # pyttb
    t, m = tnlib.random.tucker((4, 5, 6), 2, rng=0), np.random.default_rng(0).standard_normal((3, 5))
    product = tnlib.Tucker(t.core, [t.factors[0], m @ t.factors[1], t.factors[2]])
    np.testing.assert_allclose(product.full(), np.einsum("ijk,mj->imk", t.full(), m), atol=1e-12)
