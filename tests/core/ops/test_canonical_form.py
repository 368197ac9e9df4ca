"""canonical_form: one gauge for every representation of a tensor, as Tucker, train, SVD or CP."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
import pytest
from gauge_changes import assert_alike, invertible, real, scales
from hypothesis import given
from hypothesis import strategies as st

import tnlib

# ------------------------------------------------------------------------------------------------------------- Tucker


def other_tucker(t: tnlib.Tucker, seed: int, scale: float = 1.0) -> tnlib.Tucker:
    """The same tensor by other factors, one of them with a column more than its rank."""
    core, factors = oracles.wide(t.core), []
    for k, factor in enumerate(t.factors):
        r = factor.shape[1]
        g = invertible(r, t.dtype, seed + k)
        wide = np.zeros((r, r + (k == 1)), g.dtype)
        wide[:, :r] = g
        core = np.moveaxis(np.tensordot(np.linalg.pinv(wide), core, axes=([1], [k])), 0, k)
        factors.append(oracles.wide(factor) @ wide * (scale if k == 0 else 1 / scale if k == 1 else 1))
    return tnlib.Tucker(core.astype(t.dtype), [f.astype(t.dtype) for f in factors])


@st.composite
def tuckers(draw: st.DrawFn) -> tnlib.Tucker:
    d = draw(st.integers(1, 4))
    ranks = [draw(st.integers(1, 3)) for _ in range(d)]
    shape = [r + draw(st.integers(-1 if r > 1 else 0, 3)) for r in ranks]
    dtype, seed = draw(st.sampled_from(oracles.DTYPES)), draw(st.integers(0, 999))
    core = oracles.normal(ranks, dtype, seed)
    if draw(st.booleans()):
        core[..., -1] = 0 if core.shape[-1] > 1 else core[..., -1]
    return tnlib.Tucker(
        core, [oracles.normal((n, r), dtype, seed + k) for k, (n, r) in enumerate(zip(shape, ranks, strict=False))]
    )


@given(tuckers(), st.data())
def test_a_tucker_becomes_a_higher_order_svd(t: tnlib.Tucker, data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from(scales(t.dtype)))
    t = tnlib.Tucker(t.core * t.core.real.dtype.type(scale), t.factors)
    with oracles.unchanged(*t.arrays()):
        fixed = tnlib.canonical_form(t)
    assert fixed.dtype == t.dtype
    oracles.assert_gauge(fixed)
    dense = oracles.contract(tnlib.Tucker(oracles.wide(t.core) / scale, [oracles.wide(f) for f in t.factors]))
    core = oracles.wide(fixed.core) / scale
    size = np.linalg.norm(core)
    tolerance = 256 * oracles.eps(t.dtype)
    # roundoff of cancelling terms is that of the terms
    terms = np.linalg.norm(t.core / scale) * np.prod([np.linalg.norm(f, 2) for f in t.factors])
    assert oracles.norm(oracles.wide(fixed.full()) / scale - dense) <= tolerance * terms
    for k in range(core.ndim):
        slices = np.moveaxis(core, k, 0).reshape(core.shape[k], -1)
        gram = slices @ slices.conj().T
        assert oracles.norm(gram - np.diag(np.diagonal(gram))) <= tolerance * size**2
        lengths = np.sqrt(np.diagonal(gram).real)
        assert (np.diff(lengths) <= tolerance * size).all()
        want = np.linalg.svd(np.moveaxis(dense, k, 0).reshape(dense.shape[k], -1), compute_uv=False)
        np.testing.assert_allclose(lengths, want[: len(lengths)], atol=tolerance * terms)
        assert np.linalg.norm(want[len(lengths) :]) <= tolerance * terms


@oracles.each_dtype
@pytest.mark.parametrize("seed", range(3))
def test_two_tuckers_of_one_tensor_become_the_same(dtype: np.dtype, seed: int) -> None:
    ranks, shape = (3, 4, 2), (5, 6, 7)
    t = tnlib.Tucker(
        oracles.normal(ranks, dtype, seed),
        [oracles.isometry(n, r, dtype, seed + n).astype(dtype) for n, r in zip(shape, ranks, strict=False)],
    )
    one = tnlib.canonical_form(t)
    for scale in scales(dtype):
        assert_alike(tnlib.canonical_form(other_tucker(t, 50 + seed, scale)), one, 3e4)
    # and the one that is found in the dense tensor
    assert_alike(tnlib.tucker(oracles.contract(t).astype(dtype)).value, one, 3e4)
    assert_alike(tnlib.round(t).value, one, 3e4)


@oracles.each_dtype
def test_so_do_those_of_a_degenerate_one(dtype: np.dtype) -> None:
    for x in (oracles.ghz(3, 3, dtype), np.eye(12, dtype=dtype).reshape(12, 3, 4)):
        t = tnlib.tucker(x).value
        assert any(tnlib.degenerate_groups(t))
        one = tnlib.canonical_form(t)
        for seed in range(3):
            assert_alike(tnlib.canonical_form(other_tucker(t, seed)), one, 1e3)


def test_where_tucker_truncates_its_slices_are_not_yet_orthogonal() -> None:
    """What the docstring says of truncation and of iteration."""

    def off(t: tnlib.Tucker) -> float:
        slices = t.core.reshape(len(t.core), -1)
        gram = slices @ slices.T
        return oracles.norm(gram - np.diag(np.diagonal(gram))) / oracles.norm(gram)

    x = oracles.normal((6, 6, 6))
    for n_iter in (0, 3):
        cut = tnlib.tucker(x, ranks=3, n_iter=n_iter).value
        assert off(cut) > 1e-3
        fixed = tnlib.canonical_form(cut)
        assert off(fixed) < 1e-14
        oracles.assert_close(fixed.full(), cut.full())
    assert off(tnlib.tucker(x).value) < 1e-14


def test_a_tucker_too_large_to_multiply_out() -> None:
    t = tnlib.Tucker(oracles.normal((2,) * 12), [oracles.normal((1000, 2), seed=k) for k in range(12)])
    fixed = tnlib.canonical_form(t)
    assert fixed.norm() == pytest.approx(t.norm(), rel=1e-12)
    turned = tnlib.Tucker(t.core, [*t.factors[:-1], t.factors[-1] @ np.diag([1e3, 1.0])])
    back = tnlib.Tucker(np.einsum("...a,a->...a", turned.core, [1e-3, 1.0]), turned.factors)
    assert_alike(tnlib.canonical_form(back), fixed, 1e4)


def test_zeros_have_a_gauge() -> None:
    zero = tnlib.canonical_form(tnlib.Tucker(np.zeros((2, 3)), [np.ones((4, 2)), np.ones((5, 3))]))
    assert zero.ranks == (1, 1)
    assert not zero.full().any()
    oracles.assert_gauge(zero)
    cp = tnlib.canonical_form(tnlib.CP([0.0, 2.0], [np.ones((3, 2)), np.zeros((4, 2))]))
    assert not cp.full().any()
    oracles.assert_gauge(cp)


# ------------------------------------------------------------------------------------------------------ trains and SVD


@oracles.each_dtype
def test_two_trains_of_one_tensor_become_the_same(dtype: np.dtype) -> None:
    for x in (oracles.random_train((4, 5, 4, 3), (1, 3, 4, 2, 1), dtype), oracles.ghz(5, 3, dtype)):
        tt = tnlib.tt_svd(x).value
        one = tnlib.canonical_form(tt)
        assert one.center == len(one.cores) - 1
        assert_alike(one, tt, 100)
        for seed in range(3):
            cores = [oracles.wide(c) for c in tt.cores]
            for k in range(len(cores) - 1):
                g = invertible(cores[k].shape[2], dtype, seed + k)
                cores[k] = cores[k] @ g
                cores[k + 1] = np.tensordot(np.linalg.inv(g), cores[k + 1], 1)
            other = tnlib.TensorTrain([c.astype(dtype) for c in cores])
            assert_alike(tnlib.canonical_form(other), one, 1e4)


def test_coarser_groups_share_a_basis_and_keep_the_tensor() -> None:
    x = oracles.ghz(4) + 1e-7 * oracles.normal((2,) * 4)
    tt, tucker = tnlib.tt_svd(x, rtol=1e-5).value, tnlib.tucker(x, rtol=1e-5).value
    for value in (tt, tucker):
        assert not any(tnlib.degenerate_groups(value))
        groups = tnlib.degenerate_groups(value, rtol=1e-5)
        assert all(g == [slice(0, 2)] for g in groups)
        fixed = tnlib.canonical_form(value, groups=groups)
        oracles.assert_close(fixed.full(), value.full())
        first = fixed.cores[0][0] if isinstance(fixed, tnlib.TensorTrain) else fixed.factors[0]
        np.testing.assert_allclose(first, np.eye(2), atol=1e-6)
    svd = tnlib.svd(np.diag([1.0, 1.0 - 1e-7])).value
    fixed = tnlib.canonical_form(svd, groups=tnlib.degenerate_groups(svd, rtol=1e-6))
    assert oracles.true_error(np.diag([1.0, 1.0 - 1e-7]), fixed) <= 1e-7


def test_an_svd_in_another_basis_of_its_groups() -> None:
    x = oracles.with_spectrum([2, 2, 2, 1, 1], 8, 7)
    svd = tnlib.svd(x).value
    turn = np.zeros((5, 5))
    turn[:3, :3], turn[3:, 3:] = oracles.isometry(3, 3, seed=4), oracles.isometry(2, 2, seed=5)
    other = tnlib.SVD(svd.u @ turn, svd.s, turn.T @ svd.vh)
    assert_alike(tnlib.canonical_form(other), svd, 1e3)
    assert_alike(tnlib.canonical_form(svd), svd, 1e3)


# ----------------------------------------------------------------------------------------------------------------- CP


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(oracles.DTYPES),
    st.integers(0, 999),
    st.integers(0, 2),
)
def test_any_order_and_any_scales_of_components(d: int, rank: int, dtype: np.dtype, seed: int, scale: int) -> None:
    rng = np.random.default_rng(seed)
    factors = [oracles.normal((k + 3, rank), dtype, seed + k) for k in range(d)]
    cp = tnlib.CP(oracles.normal((rank,), dtype, seed + 9), factors)
    one = tnlib.canonical_form(cp)
    oracles.assert_gauge(one)
    assert one.dtype == dtype
    size = oracles.norm(one.weights)
    tolerance = 64 * oracles.eps(dtype)
    assert oracles.norm(oracles.wide(one.full()) - oracles.contract(cp)) <= tolerance * size
    order = rng.permutation(rank)
    columns = [oracles.normal((rank,), dtype, seed + 20 + k) for k in range(d)]
    columns[0] = columns[0] * real(dtype).type(scales(dtype)[scale])
    # each component by itself: what the columns gain, the weights lose
    gained = np.prod([oracles.wide(c) for c in columns], axis=0)
    weights = (oracles.wide(cp.weights) / gained).astype(dtype)
    other = tnlib.CP(weights[order], [(f * c)[:, order] for f, c in zip(factors, columns, strict=True)])
    assert_alike(tnlib.canonical_form(other), one, 300)


@oracles.each_dtype
def test_equal_weights_have_an_order_too(dtype: np.dtype) -> None:
    factors = [oracles.isometry(n, 4, dtype, n) for n in (5, 6, 7)]
    for repeated in (False, True):
        if repeated:  # components that differ in the last factor alone
            factors[0], factors[1] = (np.repeat(f[:, :2], 2, axis=1) for f in factors[:2])
        cp = tnlib.CP(np.ones(4, real(dtype)), [f.astype(dtype) for f in factors])
        one = tnlib.canonical_form(cp)
        for seed in range(10):
            order = np.random.default_rng(seed).permutation(4)
            noise = 1 + 2 * oracles.eps(dtype) * oracles.normal((4,), real(dtype), seed)
            weights = (noise * cp.weights).astype(real(dtype))
            assert_alike(tnlib.canonical_form(tnlib.CP(weights, [f[:, order] for f in cp.factors])), one, 64)


def test_equal_components_are_no_trouble() -> None:
    cp = tnlib.CP(np.ones(300), [np.ones((4, 300))] * 3)
    fixed = tnlib.canonical_form(cp)
    oracles.assert_gauge(fixed)
    oracles.assert_close(fixed.full(), cp.full())


def test_a_sign_is_found_where_a_sum_would_cancel() -> None:
    """Columns whose entries, or whose products with each other, sum to zero."""
    column = np.array([1.0, -1.0, 1.0, -1.0])[:, None]
    for signs in itertools.product([1, -1], repeat=3):
        cp = tnlib.canonical_form(tnlib.CP([float(np.prod(signs))], [s * column for s in signs]))
        assert cp.weights[0] == pytest.approx(8.0)
        for factor in cp.factors:
            np.testing.assert_allclose(factor, column / 2)


# -------------------------------------------------------------------------------------------------------- wrong input


def test_what_is_wrong_is_said() -> None:
    with oracles.refused(TypeError, "canonical_form: t must be a TensorTrain", "ndarray"):
        tnlib.canonical_form(np.eye(2))  # type: ignore[type-var]
    with oracles.refused(TypeError, "canonical_form", "Fit", "pass fit.value"):
        tnlib.canonical_form(tnlib.svd(np.eye(2)))  # type: ignore[type-var]
    with oracles.refused(TypeError, "canonical_form", "KroneckerTerms"):
        tnlib.canonical_form(tnlib.KroneckerTerms(np.ones((1, 2, 2)), [np.eye(2)]))
    with oracles.refused(ValueError, "canonical_form", "groups", "CP"):
        tnlib.canonical_form(tnlib.CP([1.0], [np.ones((2, 1))]), groups=[])
    with oracles.refused(ValueError, "canonical_form", "groups", "2 lists"):
        tnlib.canonical_form(tnlib.tucker(np.eye(3)).value, groups=[[slice(0, 3)]])
    large = tnlib.CP([1e200], [np.full((2, 1), 1e200)])
    for call in (tnlib.canonical_form, lambda cp: tnlib.match(cp, cp)):
        with oracles.refused(ValueError, "weights", "finite"):
            call(large)
