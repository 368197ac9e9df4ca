"""Gates on trains: the contract of every rounding on the dense product, optimal cuts, circuits of many gates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import trains, unfolding

import tnlib

dtypes = st.sampled_from(oracles.DTYPES)
tolerances = st.sampled_from([None, 1e-7, 0.05, 0.4, 1.0])


def dense_product(x: np.ndarray, gate: np.ndarray, legs: tuple[int, ...]) -> np.ndarray:
    """`gate` of as many row legs as column legs on `legs` of a dense array."""
    product = np.tensordot(oracles.wide(gate), oracles.wide(x), axes=(range(len(legs), 2 * len(legs)), legs))
    return np.moveaxis(product, range(len(legs)), legs)


@given(trains(largest=345.0), dtypes, st.integers(1, 3), st.data())
def test_a_gate_on_one_leg_is_exact(tt: tnlib.TensorTrain, dtype: Any, rows: int, data: st.DataObject) -> None:
    leg = data.draw(st.integers(0, len(tt.cores) - 1))
    gate = oracles.normal((rows, tt.shape[leg]), dtype, data.draw(st.integers(0, 999)))
    start = tt if data.draw(st.booleans()) else tnlib.canonicalize(tt, data.draw(st.integers(0, len(tt.cores) - 1)))
    with oracles.unchanged(*start.cores, gate):
        fit = tnlib.apply_gate(start, gate, leg)
    assert max(tnlib.isometry_errors(fit.value)) <= 256 * oracles.eps(tt.dtype)
    assert fit.value.center == leg
    assert fit.error == 0.0
    assert fit.value.dtype == np.result_type(tt.dtype, dtype)
    shifted = tnlib.TensorTrain(fit.value.cores, exponent=fit.value.exponent - tt.exponent)
    want = dense_product(tnlib.TensorTrain(tt.cores).full(), gate, (leg,))
    size = oracles.norm(tnlib.TensorTrain(tt.cores).full()) * oracles.norm(gate)
    assert oracles.norm(oracles.wide(shifted.full()) - want) <= 256 * oracles.eps(tt.dtype) * size


@given(trains(largest=345.0), dtypes, tolerances, st.sampled_from([None, None, 1, 3]), st.data())
def test_the_contract_of_a_gate_on_two_legs(
    tt: tnlib.TensorTrain, dtype: Any, rtol: float | None, cap: int | None, data: st.DataObject
) -> None:
    if len(tt.cores) == 1:
        return
    tt = tnlib.TensorTrain(tt.cores, tt.center)
    site, seed = data.draw(st.integers(0, len(tt.cores) - 2)), data.draw(st.integers(0, 999))
    legs = (site, site + 1) if data.draw(st.booleans()) else (site + 1, site)
    sizes = [tt.shape[k] for k in legs]
    rows = [data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))]
    gate = oracles.normal((*rows, *sizes), dtype, seed)
    with oracles.unchanged(*tt.cores, gate):
        fit, warned = oracles.quietly(lambda: tnlib.apply_gate(tt, gate, legs, rtol=rtol, max_rank=cap))
    doubled = tnlib.TensorTrain([oracles.wide(core) for core in tt.cores])
    want = dense_product(oracles.contract(doubled), gate, legs)
    low = np.finfo(tt.dtype).eps > np.finfo(fit.value.dtype).eps  # the train has fewer digits than the result
    if oracles.norm(want) > 1e-3 * oracles.norm(oracles.contract(doubled)) * oracles.norm(gate) and not low:
        oracles.assert_fit(fit, want, rtol=rtol)
    assert max(tnlib.isometry_errors(fit.value)) <= 256 * oracles.eps(tt.dtype)
    oracles.assert_warned(fit, warned)
    assert fit.value.center == site + 1
    if cap is not None:
        assert fit.value.ranks[site + 1] <= cap


@oracles.each_dtype
def test_the_cut_is_optimal_for_a_gate_that_is_not_unitary(dtype: np.dtype) -> None:
    tt = tnlib.tt_svd(oracles.random_train((3, 4, 5, 3), (1, 3, 7, 3, 1), dtype)).value
    gate = oracles.normal((20, 20), dtype, 5)
    want = dense_product(tt.full(), gate.reshape(4, 5, 4, 5), (1, 2))
    s = np.linalg.svd(unfolding(want, 2), compute_uv=False)
    for rank in (1, 4, 8):
        fit = tnlib.apply_gate(tt, gate, (1, 2), max_rank=rank)
        best = oracles.norm(s[rank:]) / oracles.norm(s)
        assert oracles.true_error(want, fit.value) == pytest.approx(best, abs=128 * oracles.eps(dtype))
        assert fit.error == pytest.approx(best, rel=1e-3, abs=64 * oracles.eps(dtype))


def test_a_single_precision_train_gets_no_better_error_than_it_has() -> None:
    tt = tnlib.tt_svd(oracles.random_train((3, 4, 5, 3), (1, 3, 7, 3, 1), np.float32)).value
    fit = tnlib.apply_gate(tt, oracles.normal((20, 20), np.float64, 5), (1, 2), max_rank=4)
    assert fit.value.dtype == np.float64
    assert max(tnlib.isometry_errors(fit.value)) <= 1e-13


def test_a_circuit_gives_the_state_of_the_dense_simulation() -> None:
    rng = np.random.default_rng(0)
    state, dense = tnlib.product_state(np.eye(2)[[0] * 6]), np.zeros((2,) * 6)
    dense[(0,) * 6] = 1
    for k in (0, 2, 4, 1, 3, 0, 2, 4, 1, 3):
        unitary, _ = np.linalg.qr(rng.normal(size=(4, 4)) + 1j * rng.normal(size=(4, 4)))
        state = tnlib.apply_gate(state, unitary, (k, k + 1)).value
        dense = dense_product(dense, unitary.reshape(2, 2, 2, 2), (k, k + 1))
    assert oracles.true_error(dense, state) <= 1e-14
    assert max(tnlib.isometry_errors(state)) <= 1e-13
    assert state.ranks == (1, 2, 4, 8, 4, 2, 1)


@pytest.mark.parametrize("exponent", [-2000, 2000, 10**12])
def test_the_scale_of_a_train_changes_no_rank(exponent: int) -> None:
    tt = tnlib.random.tensor_train((2,) * 6, 5, dtype=np.complex128, rng=1)
    far = tnlib.TensorTrain(tt.cores, tt.center, exponent=exponent)
    for legs, gate in ((2, oracles.normal((2, 2), np.float64, 3)), ((3, 2), oracles.normal((4, 4), np.float64, 2))):
        plain, scaled = (tnlib.apply_gate(t, gate, legs, rtol=0.1) for t in (tt, far))
        assert scaled.value.ranks == plain.value.ranks
        assert scaled.error == plain.error
        shifted = tnlib.TensorTrain(scaled.value.cores, exponent=scaled.value.exponent - exponent)
        assert oracles.true_error(plain.value.full(), shifted) <= 1e-14


@pytest.mark.parametrize("size", [1e-300, 1e308])
def test_cores_and_gates_at_the_ends_of_the_range(size: float) -> None:
    tt = tnlib.TensorTrain([np.full((1, 3, 1), size), np.full((1, 3, 1), 3**-0.5)], 0)
    one, two = tnlib.apply_gate(tt, np.full((2, 3), size), 0), tnlib.apply_gate(tt, np.full((9, 9), size), (0, 1))
    assert one.value.log_norm() == pytest.approx(2 * math.log(size) + math.log(18) / 2, rel=1e-13)
    assert two.value.log_norm() == pytest.approx(2 * math.log(size) + math.log(9 * 27) / 2, rel=1e-13)


def test_both_legs_as_centre_give_the_same() -> None:
    tt = tnlib.random.tensor_train((2, 3, 4, 2), 4, dtype=np.complex128, rng=0)
    gate = oracles.normal((12, 12), np.complex128, 1)
    want, *others = (tnlib.apply_gate(tnlib.canonicalize(tt, k), gate, (1, 2), max_rank=3) for k in range(4))
    for fit in others:
        assert fit.error == pytest.approx(want.error, rel=1e-10)
        assert oracles.true_error(want.value.full(), fit.value) <= 1e-13
        assert max(tnlib.isometry_errors(fit.value)) <= 1e-13


def test_a_train_of_other_arrays_is_refused() -> None:
    torch = pytest.importorskip("torch")
    tt = tnlib.tt_svd(torch.ones(2, 2)).value
    with oracles.refused(TypeError, "apply_gate: tt must hold numpy arrays", "to_numpy()"):
        tnlib.apply_gate(tt, np.eye(2), 0)
    assert isinstance(tnlib.apply_gate(tt.to_numpy(), torch.eye(2), 0).value.cores[0], np.ndarray)


def test_a_gate_that_annihilates_the_state_gives_zero() -> None:
    tt = tnlib.product_state(np.eye(2)[[0, 0, 0]])
    fit = tnlib.apply_gate(tt, np.diag([0.0, 1.0, 1.0, 1.0]), (1, 2))
    assert fit.value.norm() == 0.0
    assert fit.error == 0.0


def test_wrong_input_is_refused() -> None:
    tt = tnlib.random.tensor_train((2, 3, 4), 2, rng=0)
    for legs in ((), (0, 1, 2)):
        with oracles.refused(ValueError, "apply_gate: legs must be one leg or two", "tnlib.embed"):
            tnlib.apply_gate(tt, np.eye(24), legs)
    with oracles.refused(ValueError, "apply_gate: gate must have 3 columns", "(6, 6)"):
        tnlib.apply_gate(tt, np.eye(6), 1)
    with oracles.refused(ValueError, "apply_gate: gate must have shape (6, 6) or (m, m', 2, 3)", "(4, 4)"):
        tnlib.apply_gate(tt, np.eye(4), (0, 1))
    with oracles.refused(ValueError, "apply_gate: legs", "-3 and 2"):
        tnlib.apply_gate(tt, np.eye(4), 3)
    with oracles.refused(ValueError, "apply_gate: gate must be finite"):
        tnlib.apply_gate(tt, np.full((2, 2), np.nan), 0)
    with oracles.refused(TypeError, "apply_gate: keywords", "max_rank="):
        tnlib.apply_gate(tt, np.eye(2), 0, max_bond=4)  # type: ignore[call-arg]
    with oracles.refused(TypeError, "apply_gate: tt must be a TensorTrain"):
        tnlib.apply_gate(tnlib.eye((2, 2)), np.eye(2), 0)  # type: ignore[arg-type]


def test_a_missed_tolerance_on_distant_legs_is_reported_by_apply_gate() -> None:
    swap = np.eye(4)[[0, 2, 1, 3]]
    with pytest.warns(tnlib.ConvergenceWarning, match="apply_gate: the error") as caught:
        tnlib.apply_gate(tnlib.random.tensor_train((2,) * 4, 4, rng=0), swap, (0, 3), rtol=1e-6, max_rank=1)
    assert [warning.filename for warning in caught] == [__file__]
