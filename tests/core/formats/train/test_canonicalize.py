"""Gauges of trains: what stays the same, what becomes isometric, and what a bond carries."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib

SHAPES = [(4, 5, 6, 3), (2,) * 9, (6, 1, 7, 1), (5,), (1, 1, 1), (3, 8)]


@st.composite
def trains(draw: st.DrawFn) -> tnlib.TensorTrain:
    """Any train: bonds too large for their legs, ranks lower than the bonds, scales from 1e-150 to 1e150."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    ranks = [1, *(draw(st.integers(1, 6)) for _ in shape[1:]), 1]
    dtype = draw(st.sampled_from(oracles.DTYPES))
    cores = oracles.random_cores(shape, ranks, dtype, draw(st.integers(0, 999)))
    if draw(st.booleans()):
        k = draw(st.integers(0, len(cores) - 1))
        cores[k][..., -1] = 0 if len(cores) > 1 else cores[k][..., -1]
    log_scale = draw(
        st.sampled_from([0.0, 1.5, -345.0, 345.0] if dtype.itemsize >= 8 and dtype != "complex64" else [0])
    )
    return tnlib.TensorTrain(cores, log_scale=log_scale)


def assert_same_tensor(a: Any, b: Any, factor: float = 64) -> None:
    """norm(a - b) is roundoff of their norm, with the scales set aside."""
    left, right = (type(t)(t.cores, exponent=t.exponent - b.exponent) for t in (a, b))
    x, y = oracles.wide(left.full()), oracles.wide(right.full())
    assert oracles.norm(x - y) <= factor * oracles.eps(b.dtype) * len(b.cores) * max(oracles.norm(y), 1e-300)


def unfolding(x: np.ndarray, bond: int) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:bond]), -1)


# ------------------------------------------------------------------------------------------------------- canonicalize


@given(trains(), st.data())
def test_any_train_at_any_centre(tt: tnlib.TensorTrain, data: st.DataObject) -> None:
    center = data.draw(st.integers(0, len(tt.cores) - 1))
    with oracles.unchanged(*tt.cores):
        mixed = tnlib.canonicalize(tt, center)
    assert mixed.center == center
    assert mixed.dtype == tt.dtype
    assert_same_tensor(mixed, tt)
    errors = tnlib.isometry_errors(mixed)
    assert max(errors) <= 64 * oracles.eps(tt.dtype) * max(mixed.ranks)
    assert errors[center] == 0.0
    assert all(new <= old for new, old in zip(mixed.ranks, tt.ranks, strict=True))
    # the norm is that of the centre
    size = (
        math.log(oracles.norm(mixed.cores[center])) + mixed.log_scale
        if oracles.norm(mixed.cores[center])
        else -math.inf
    )
    assert size == pytest.approx(tt.log_norm(), abs=1e3 * oracles.eps(tt.dtype))


@given(trains(), st.data())
def test_a_known_centre_moves_by_the_cores_in_between_alone(tt: tnlib.TensorTrain, data: st.DataObject) -> None:
    start, stop = (data.draw(st.integers(0, len(tt.cores) - 1)) for _ in range(2))
    mixed = tnlib.canonicalize(tt, start)
    moved = tnlib.canonicalize(mixed, stop)
    for k in range(len(tt.cores)):
        if not min(start, stop) <= k <= max(start, stop):
            assert np.array_equal(moved.cores[k], mixed.cores[k])
    assert max(tnlib.isometry_errors(moved)) <= 64 * oracles.eps(tt.dtype) * max(mixed.ranks)
    assert_same_tensor(moved, tt)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_operators_have_centres_too(dtype: np.dtype) -> None:
    cores = [oracles.normal(shape, dtype, k) for k, shape in enumerate([(1, 2, 3, 4), (4, 3, 2, 5), (5, 2, 2, 1)])]
    operator = tnlib.TTMatrix(cores)
    for center in range(3):
        mixed = tnlib.canonicalize(operator, center)
        assert mixed.row_shape, mixed.col_shape == (operator.row_shape, operator.col_shape)
        oracles.assert_close(mixed.full(), operator.full(), dtype)
        assert max(tnlib.isometry_errors(mixed)) <= 64 * oracles.eps(dtype) * 5
    assert len(tnlib.schmidt_values(operator, 1)) == 4


def test_a_thousand_cores_neither_overflow_nor_lose_their_norm() -> None:
    for size in (1e-3, 1e3):
        cores = [size * oracles.normal((1 if k == 0 else 8, 4, 1 if k == 999 else 8), seed=k) for k in range(1000)]
        tt = tnlib.TensorTrain(cores)
        for center in (0, 500, 999):
            mixed = tnlib.canonicalize(tt, center)
            assert max(tnlib.isometry_errors(mixed)) < 1e-13
            assert mixed.log_norm() == pytest.approx(tt.log_norm(), rel=1e-12)
        form = tnlib.vidal(tt)
        assert form.log_scale == pytest.approx(tt.log_norm(), rel=1e-12)


def test_zero_trains_have_gauges() -> None:
    zero = tnlib.TensorTrain([np.zeros((1, 3, 2)), np.zeros((2, 4, 2)), np.zeros((2, 3, 1))])
    mixed = tnlib.canonicalize(zero, 1)
    assert not mixed.full().any()
    assert max(tnlib.isometry_errors(mixed)) < 1e-15
    form = tnlib.vidal(zero)
    assert not form.full().any()
    assert form.ranks == (1, 1, 1, 1)
    assert not tnlib.schmidt_values(zero, 1).any()
    assert tnlib.entropy(zero, 2) == 0.0
    assert tnlib.truncate_bond(zero, 1).value.ranks[1] == 1


# -------------------------------------------------------------------------------------------------------------- Vidal


@given(trains())
def test_vidal_form(tt: tnlib.TensorTrain) -> None:
    form = tnlib.vidal(tt)
    assert_same_tensor(form.train(), tt)
    if tt.log_norm() == -math.inf:
        return
    tolerance = 256 * oracles.eps(tt.dtype) * max(form.ranks)
    assert max(tnlib.isometry_errors(form.train())) <= tolerance  # L G is left-isometric
    for k, s in enumerate(form.lambdas):
        assert np.linalg.norm(s) == pytest.approx(1.0, abs=tolerance)
        assert (np.diff(s) <= 0).all()
        # G L is right-isometric as far as small Schmidt values were known when they were divided out
        right = form.gammas[k + 1] * (form.lambdas[k + 1] if k + 1 < len(form.lambdas) else np.ones(1))
        rows = right.reshape(len(right), -1)
        gap = np.abs(rows @ rows.conj().T - np.eye(len(rows)))
        assert (gap * np.minimum.outer(s, s) <= tolerance).all()
    assert form.log_scale == pytest.approx(tt.log_norm(), abs=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_lambdas_are_the_singular_values_of_every_unfolding(shape: tuple[int, ...], dtype: np.dtype) -> None:
    x = oracles.random_train(shape, [1, *[3] * (len(shape) - 1), 1], dtype)
    form = tnlib.vidal(tnlib.tt_svd(3 * x).value)
    assert form.log_scale == pytest.approx(math.log(3), abs=1e3 * oracles.eps(dtype))
    for bond, s in enumerate(form.lambdas, 1):
        want = np.linalg.svd(unfolding(oracles.wide(x), bond), compute_uv=False)
        np.testing.assert_allclose(s, want[: len(s)], atol=64 * oracles.eps(dtype))
        assert np.linalg.norm(want[len(s) :]) <= 64 * oracles.eps(dtype)


def test_vidal_of_one_tensor_is_the_same_from_any_of_its_trains() -> None:
    x = oracles.random_train((4, 5, 4, 3), (1, 3, 4, 2, 1))
    tt = tnlib.tt_svd(x).value
    turned = tnlib.canonicalize(tnlib.canonicalize(tt, 0), 2)
    for a, b in zip(tnlib.vidal(tt).arrays(), tnlib.vidal(turned).arrays(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)


# ---------------------------------------------------------------------------------------------------- Schmidt spectra


@given(trains(), st.data())
def test_schmidt_values_of_any_bond(tt: tnlib.TensorTrain, data: st.DataObject) -> None:
    if len(tt.cores) == 1:
        with oracles.refused(ValueError, "schmidt_values", "bond"):
            tnlib.schmidt_values(tt, 1)
        return
    bond = data.draw(st.integers(1, len(tt.cores) - 1))
    x = oracles.wide(tnlib.TensorTrain(tt.cores).full())
    want = np.linalg.svd(unfolding(x, bond), compute_uv=False) * math.exp(tt.log_scale)
    top = want[0] if want[0] > 0 else 1.0
    for center in (None, 0, bond - 1, bond, len(tt.cores) - 1):
        got = tnlib.schmidt_values(tt if center is None else tnlib.canonicalize(tt, center), bond)
        count = min(len(got), len(want))
        np.testing.assert_allclose(got[:count] / top, want[:count] / top, atol=256 * oracles.eps(tt.dtype))


@pytest.mark.parametrize("bond", [1, 2, 3])
def test_entropies_by_their_definitions(bond: int) -> None:
    x = oracles.random_train((3, 4, 5, 3), (1, 3, 6, 2, 1), np.complex128)
    tt = tnlib.tt_svd(7 * x).value
    s = np.linalg.svd(unfolding(x, bond), compute_uv=False)
    p = s[s > 1e-12] ** 2
    p = p / p.sum()
    assert tnlib.entropy(tt, bond) == pytest.approx(-np.sum(p * np.log(p)), abs=1e-12)
    assert tnlib.entropy(tt, bond, base=2) == pytest.approx(-np.sum(p * np.log2(p)), abs=1e-12)
    assert tnlib.entropy(tt, bond, order=2) == pytest.approx(-np.log(np.sum(p**2)), abs=1e-12)
    assert tnlib.entropy(tt, bond, order=0) == pytest.approx(np.log(len(p)), abs=1e-12)
    assert tnlib.entropy(tt, bond, order=math.inf) == pytest.approx(-np.log(p.max()), abs=1e-12)
    falling = [tnlib.entropy(tt, bond, order=order) for order in (0, 0.5, 1 - 1e-7, 1, 1 + 1e-7, 2, 5, math.inf)]
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(falling))
    spectrum = tnlib.entanglement_spectrum(tt, bond)
    np.testing.assert_allclose(np.exp(-spectrum), p, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
def test_isometry_errors_are_those_of_the_stored_cores(dtype: Any) -> None:
    mixed = tnlib.canonicalize(tnlib.TensorTrain(oracles.random_cores((3, 2, 4), (1, 3, 4, 1), dtype)), 2)
    for factor, least in (
        (3.0, 8.0),
        (1 / 3, 0.8),
    ):  # norm(Q^H Q - 1) = |factor^2 - 1| sqrt(columns) of a multiple of Q
        cores = [mixed.cores[0], mixed.cores[1] * dtype(factor), mixed.cores[2]]
        assert tnlib.isometry_errors(tnlib.TensorTrain(cores, 2))[1] >= least
    assert max(tnlib.isometry_errors(tnlib.TensorTrain(mixed.cores, 2, log_scale=1e4))) < 1e3 * oracles.eps(dtype)


def test_renyi_entropies_of_any_order() -> None:
    flat = tnlib.tt_svd(np.eye(4) / 2).value
    for order in (1 + 1e-14, 1 - 1e-9, 1 + 1e-6, 1.5, 1000, 1e12):
        assert tnlib.entropy(flat, 1, order=order, base=2) == pytest.approx(2, rel=1e-13)
    tt = tnlib.tt_svd(np.diag([4.0, 3.0, 1e-3])).value
    p = np.array([16, 9, 1e-6]) / (25 + 1e-6)
    slope = np.sum(p * np.log(p) ** 2) - np.sum(p * np.log(p)) ** 2  # the derivative at 1 is half of minus that
    for away in (-1e-4, -1e-9, 1e-13, 1e-7):
        expected = -np.sum(p * np.log(p)) - away * slope / 2
        assert tnlib.entropy(tt, 1, order=1 + away) == pytest.approx(expected, abs=1e-13 + 10 * away**2)
    assert tnlib.entropy(tt, 1, order=1e6) == pytest.approx(-np.log(p.max()), rel=2e-6)


def test_product_states_and_maximally_entangled_ones() -> None:
    level = tnlib.entanglement_spectrum(tnlib.TensorTrain([np.full((1, 3, 1), 0.7)] * 2), 1)
    assert level == pytest.approx([0.0], abs=1e-15)
    assert not np.signbit(level[0])
    product = tnlib.TensorTrain([oracles.normal((1, 3, 1), seed=k) for k in range(4)])
    assert [tnlib.entropy(product, bond) for bond in (1, 2, 3)] == pytest.approx([0, 0, 0], abs=1e-14)
    ghz = tnlib.tt_svd(oracles.ghz(5, 3)).value
    for bond, order in itertools.product((1, 2, 3, 4), (0, 1, 2, math.inf)):
        assert tnlib.entropy(ghz, bond, order=order) == pytest.approx(math.log(3), abs=1e-13)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_a_bond_is_cut_optimally(dtype: np.dtype) -> None:
    x = oracles.random_train((4, 5, 6, 3), (1, 4, 9, 3, 1), dtype)
    tt = tnlib.tt_svd(x).value
    for bond, rank in [(1, 2), (2, 3), (2, 8), (3, 1)]:
        fit = tnlib.truncate_bond(tt, bond, max_rank=rank)
        s = np.linalg.svd(unfolding(oracles.wide(x), bond), compute_uv=False)
        assert fit.value.ranks[bond] == rank
        assert fit.value.center == bond
        assert max(tnlib.isometry_errors(fit.value)) <= 64 * oracles.eps(dtype) * 9
        best = oracles.norm(s[rank:]) / oracles.norm(s)
        assert oracles.true_error(x, fit.value) == pytest.approx(best, abs=64 * oracles.eps(dtype))
        assert fit.error == pytest.approx(best, rel=1e-3, abs=64 * oracles.eps(dtype))
    for rtol in (0.0, 1e-6, 0.05, 0.3, 1.0):
        fit = tnlib.truncate_bond(tt, 2, rtol=rtol)
        assert oracles.true_error(x, fit.value) <= rtol + 64 * oracles.eps(dtype)


def test_a_cap_between_equal_values_is_reported() -> None:
    fit, warned = oracles.quietly(lambda: tnlib.truncate_bond(tnlib.tt_svd(oracles.ghz(4)).value, 2, max_rank=1))
    assert warned == [tnlib.DegenerateCutWarning]
    assert "bond 2" in fit.notes[0]


# -------------------------------------------------------------------------------------------------- correlation length


def aklt() -> np.ndarray:
    plus, minus = np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 0.0]])
    middle = np.diag([1.0, -1.0])
    return np.stack([math.sqrt(2 / 3) * plus, -math.sqrt(1 / 3) * middle, -math.sqrt(2 / 3) * minus], axis=1)


def test_correlation_lengths_that_are_known() -> None:
    assert tnlib.correlation_length(aklt()) == pytest.approx(1 / math.log(3), rel=1e-12)
    assert tnlib.correlation_length(1e200 * aklt()) == pytest.approx(1 / math.log(3), rel=1e-12)
    assert tnlib.correlation_length(np.ones((1, 4, 1))) == 0.0
    ghz = np.zeros((2, 2, 2))
    ghz[[0, 1], [0, 1], [0, 1]] = 1
    assert tnlib.correlation_length(ghz) == math.inf


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_correlation_length_of_a_large_bond_and_in_another_gauge(dtype: Any) -> None:
    small = oracles.normal((6, 3, 6), dtype)
    turn = oracles.normal((6, 6), dtype, seed=5)
    turned = np.einsum("ab,bnc,cd->and", turn, small, np.linalg.inv(turn))
    length = tnlib.correlation_length(small)
    assert tnlib.correlation_length(turned) == pytest.approx(length, rel=1e-8)
    # beside a block whose eigenvalues are smaller, the same two lead; now by iteration
    large = np.zeros((40, 3, 40), dtype)
    large[:6, :, :6] = small
    large[6:, :, 6:] = 1e-3 * oracles.normal((34, 3, 34), dtype, seed=1)
    assert tnlib.correlation_length(large) == pytest.approx(length, rel=1e-6)


@pytest.mark.parametrize("seed", [28, 73])
def test_correlation_length_of_moduli_that_lie_close(seed: int) -> None:
    a = oracles.normal((33, 2, 33), np.complex128, seed)
    transfer = np.einsum("anb,cnd->acbd", a.conj(), a).reshape(33**2, -1)
    first, second = np.sort(np.abs(np.linalg.eigvals(transfer)))[:-3:-1]
    assert tnlib.correlation_length(a) == pytest.approx(-1 / np.log(second / first), rel=1e-8)


def test_correlation_length_of_zero_and_nilpotent_transfer_matrices() -> None:
    assert tnlib.correlation_length(np.zeros((3, 2, 3))) == tnlib.correlation_length(np.zeros((40, 2, 40))) == 0.0
    step = np.eye(40, k=1)[:, None]  # its powers vanish
    assert tnlib.correlation_length(step[:3, :, :3]) == 0.0
    assert tnlib.correlation_length(step) == 0.0


# ---------------------------------------------------------------------------------------------- states of physics


def test_a_ground_state_beside_quimb() -> None:
    qtn = pytest.importorskip("quimb.tensor")
    dmrg = qtn.DMRG2(qtn.MPO_ham_heis(12), bond_dims=[8, 16, 32], cutoffs=1e-12)
    dmrg.solve(tol=1e-8, verbosity=0)
    state = dmrg.state
    state.permute_arrays("lpr")
    first, *middle, last = (np.asarray(a) for a in state.arrays)
    tt = tnlib.TensorTrain([first[None], *middle, last[..., None]])
    for bond in range(1, 12):
        p = np.sort(np.asarray(state.schmidt_values(bond)))[::-1]  # squares
        s = tnlib.schmidt_values(tt, bond)
        np.testing.assert_allclose(s[: len(p)] ** 2, p[: len(s)], atol=1e-12)
        assert tnlib.entropy(tt, bond, base=2) == pytest.approx(state.entropy(bond), abs=1e-9)


# ------------------------------------------------------------------------------------------------------- wrong input


def test_what_is_wrong_is_said() -> None:
    tt = tnlib.tt_svd(oracles.normal((3, 4, 5))).value
    for wrong in (3, 17):
        with oracles.refused(ValueError, "canonicalize", "center", "3 cores", str(wrong)):
            tnlib.canonicalize(tt, wrong)
        with oracles.refused(ValueError, "schmidt_values", "bond", "1 and 2", str(wrong)):
            tnlib.schmidt_values(tt, wrong)
    for bond in (0, -1):
        with oracles.refused(ValueError, "entropy", "bond", str(bond)):
            tnlib.entropy(tt, bond)
    with oracles.refused(ValueError, "entropy", "2 cores", "got 1"):
        tnlib.entropy(tnlib.TensorTrain([np.ones((1, 3, 1))]), 1)
    for dtype in (np.float64, np.complex64):
        large = tnlib.TensorTrain([np.ones((1, 2, 1), dtype)] * 2, log_scale=1e3)
        with oracles.refused(ValueError, "schmidt_values", "range", np.finfo(dtype).dtype.name):
            tnlib.schmidt_values(large, 1)
    with oracles.refused(TypeError, "canonicalize", "center", "1.5"):
        tnlib.canonicalize(tt, 1.5)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "vidal", "TensorTrain", "ndarray"):
        tnlib.vidal(np.eye(3))  # type: ignore[arg-type]
    with oracles.refused(TypeError, "truncate_bond", "TTMatrix", "Tucker"):
        tnlib.truncate_bond(tnlib.tucker(np.ones((2, 2))).value, 1)  # type: ignore[type-var]
    with oracles.refused(ValueError, "entropy", "order", "-1"):
        tnlib.entropy(tt, 1, order=-1)
    with oracles.refused(ValueError, "entropy", "order", "nan"):
        tnlib.entropy(tt, 1, order=math.nan)
    for base in (0, 0.5, 1, math.inf):
        with oracles.refused(ValueError, "entropy", "base"):
            tnlib.entropy(tt, 1, base=base)
    with oracles.refused(TypeError, "entropy", "base", "'2'"):
        tnlib.entropy(tt, 1, base="2")  # type: ignore[arg-type]
    with oracles.refused(ValueError, "isometry_errors", "center", "None"):
        tnlib.isometry_errors(tnlib.TensorTrain(tt.cores))
    with oracles.refused(ValueError, "correlation_length", "equal", "(2, 3, 4)"):
        tnlib.correlation_length(np.ones((2, 3, 4)))
    with oracles.refused(ValueError, "correlation_length", "finite"):
        tnlib.correlation_length(np.full((2, 2, 2), np.nan))
    with oracles.refused(ValueError, "Vidal", "lambda 0", "positive"):
        tnlib.Vidal([np.ones((1, 2, 2)), np.ones((2, 2, 1))], [np.array([1.0, 0.0])])
    with oracles.refused(ValueError, "Vidal", "lambdas", "bonds"):
        tnlib.Vidal([np.ones((1, 2, 2)), np.ones((2, 2, 1))], [np.ones(3)])
