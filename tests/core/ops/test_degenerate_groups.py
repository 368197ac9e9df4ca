"""Equal singular values: their groups, one basis of each whatever rounding did, and the distance to where it jumps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from slow_cases import mostly_slow

import tnlib

# ------------------------------------------------------------------------------------------------------------- inputs


def swap(n: int) -> np.ndarray:
    """The operator that exchanges two legs of size n, as a matrix."""
    return np.eye(n * n).reshape(n, n, n, n).transpose(0, 1, 3, 2).reshape(n * n, n * n)


TENSORS: dict[str, np.ndarray] = {
    "GHZ of 3": oracles.ghz(3),
    "GHZ of 5": oracles.ghz(5),
    "GHZ of 4 qutrits": oracles.ghz(4, 3),
    "identity": np.eye(9),
    "orthogonal": oracles.isometry(12, 12),
    "tall isometry": oracles.isometry(40, 5),
    "isometry with legs": oracles.isometry(12, 4, seed=3).reshape(3, 4, 4),
    "equal matrices, stacked": np.stack([oracles.normal((4, 5))] * 6),
    "identity x matrix": np.kron(np.eye(3), oracles.with_spectrum([3, 2, 1], 3, 3)),
    "matrix x identity": np.kron(oracles.with_spectrum([3, 2, 1], 3, 3), np.eye(3)),
    "swap": swap(3),
    "swap with legs": swap(3).reshape(3, 3, 3, 3),
    "projector": oracles.isometry(9, 4, seed=5) @ oracles.isometry(9, 4, seed=5).T,
    "two groups": oracles.with_spectrum([2, 2, 2, 1, 1], 8, 7),
}
SQUARES = [name for name, x in TENSORS.items() if x.shape == (9, 9)]

METHODS: dict[str, Callable[..., tnlib.Fit[Any]]] = {
    "svd": lambda x, **tolerance: tnlib.svd(x, left=0, **tolerance),
    "tt_svd": tnlib.tt_svd,
    "tucker": tnlib.tucker,
    "round": lambda x, **tolerance: tnlib.round(tnlib.tt_svd(x).value, **tolerance),
    "ttm_svd": lambda x, **tolerance: tnlib.ttm_svd(x, (3, 3), (3, 3), **tolerance),
    "round of ttm_svd": lambda x, **tolerance: tnlib.round(tnlib.ttm_svd(x, (3, 3), (3, 3)).value, **tolerance),
}
PAIRS = [
    (name, method) for name, method in itertools.product(TENSORS, METHODS) if "ttm" not in method or name in SQUARES
]


def unfoldings(x: np.ndarray, method: str) -> list[np.ndarray]:
    """The matrices whose left singular vectors a method returns."""
    if method == "tucker":
        return [np.moveaxis(x, k, 0).reshape(x.shape[k], -1) for k in range(x.ndim)]
    if "ttm" in method:
        x = x.reshape(3, 3, 3, 3).transpose(0, 2, 1, 3).reshape(9, 9)
    return [x.reshape(int(np.prod(x.shape[:k])), -1) for k in range(1, x.ndim if method != "svd" else 2)]


def smallest_gap(x: np.ndarray, method: str) -> float:
    """Gap between groups of singular values, and of the last one to zero, relative to the norm of the tensor."""
    gaps = []
    for matrix in unfoldings(x, method):
        s = np.append(np.linalg.svd(matrix, compute_uv=False), 0.0) / np.linalg.norm(x)
        gaps += [gap for gap in -np.diff(s) if gap > 1e-9]
    return min(gaps)


def moved(a: Any, b: Any) -> float:
    assert [x.shape for x in a.arrays()] == [x.shape for x in b.arrays()]
    return max(oracles.norm(oracles.wide(x) - oracles.wide(y)) for x, y in zip(a.arrays(), b.arrays(), strict=True))


# -------------------------------------------------------------------------------------------------- what moves how far


@pytest.mark.parametrize(("name", "method"), mostly_slow(PAIRS, PAIRS[::2]))
def test_a_perturbation_moves_the_cores_by_a_multiple_of_it_over_the_gap(name: str, method: str) -> None:
    """So does a larger one under groups as coarse, of which `rtol` is then the tolerance."""
    for dtype, size, rtol in (
        (np.float64, 1e-15, None),
        (np.float32, 5e-7, None),
        (np.complex128, 1e-15, None),
        (np.float64, 1e-12, 1e-9),
        (np.float32, 1e-6, 1e-3),
    ):

        def form(x: np.ndarray, dtype: Any = dtype, rtol: float | None = rtol) -> Any:
            value = METHODS[method](x.astype(dtype), rtol=rtol).value
            groups = None if rtol is None else tnlib.degenerate_groups(value, rtol=rtol)
            return value if groups is None else tnlib.canonical_form(value, groups=groups)

        x = TENSORS[name] * (np.exp(0.3j) if dtype is np.complex128 else 1)
        before = form(x)
        allowed = 300 * size * np.sqrt(x.size) / np.linalg.norm(x) / smallest_gap(x, method)
        assert allowed < 0.5, "the case proves nothing"
        for seed in range(4):
            after = form(x + size * oracles.normal(x.shape, seed=1000 + seed))
            assert moved(before, after) <= allowed * max(1.0, oracles.norm(before.arrays()[-1]))


@given(st.integers(0, 999), st.sampled_from([1e-15, 1e-12, 1e-9]), st.integers(1, 6), st.integers(0, 6))
def test_isometries_that_stay_isometries(seed: int, size: float, r: int, more: int) -> None:
    """All singular values stay equal, however far the space moves."""
    u = oracles.isometry(r + more, r, seed=seed)
    turned = np.linalg.qr(u + size * oracles.normal(u.shape, seed=seed + 1000))[0]
    one, other = (tnlib.tt_svd(a @ oracles.isometry(r, r, seed=k)).value for k, a in enumerate((u, turned)))
    tie = tnlib.nearest_tie(one)
    assume(tie > 1e3 * size)
    pivot = np.abs(one.cores[0][0]).max(axis=0).min()  # how long the last pivot is
    assert oracles.norm(one.cores[0] - other.cores[0]) <= 100 * max(size, 1e-15) * u.size / pivot


@given(st.integers(0, 999), st.sampled_from(oracles.DTYPES), st.sampled_from([1.0, 1e-12, 1e-15]))
def test_values_that_stand_alone_move_by_the_gap_between_them(seed: int, dtype: np.dtype, size: float) -> None:
    x = oracles.with_spectrum([4, 3, 2, 1], 7, 6, dtype, seed)
    noise = size * (4 * oracles.eps(dtype)) * oracles.normal(x.shape, dtype, seed)
    one, other = tnlib.svd(x, max_rank=4).value, tnlib.svd((x + noise).astype(dtype), max_rank=4).value
    assume(tnlib.nearest_tie(one) > 1e-4)
    assert moved(one, other) <= 300 * oracles.eps(dtype)


# ------------------------------------------------------------------------------------------------------------- groups


def test_groups_of_plain_values() -> None:
    assert tnlib.degenerate_groups(np.array([3.0, 2.0, 1.0])) == []
    assert tnlib.degenerate_groups([2.0, 2.0, 1.0, 1.0, 1.0]) == [slice(0, 2), slice(2, 5)]
    assert tnlib.degenerate_groups(np.array([1.0, 1.0 - 1e-15])) == [slice(0, 2)]
    assert tnlib.degenerate_groups(np.array([1.0, 1.0 - 1e-12])) == []
    assert tnlib.degenerate_groups(np.array([1.0, 1.0 - 1e-12]), rtol=1e-11) == [slice(0, 2)]
    assert tnlib.degenerate_groups(np.array([1.0, 1.0 - 1e-6], np.float32)) == [slice(0, 2)]
    assert tnlib.degenerate_groups(np.zeros(3)) == [slice(0, 3)]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=6), st.sampled_from([1, 1e-150]))
def test_groups_are_found_whatever_the_scale(runs: Sequence[tuple[int, int]], scale: float) -> None:
    levels = dict(runs)
    s = np.repeat(sorted(levels, reverse=True), [levels[k] for k in sorted(levels, reverse=True)]) * scale
    want, start = [], 0
    for level in sorted(levels, reverse=True):
        if levels[level] > 1:
            want.append(slice(start, start + levels[level]))
        start += levels[level]
    assert tnlib.degenerate_groups(s) == want
    value = tnlib.svd(oracles.with_spectrum(s / scale, len(s) + 2, len(s) + 1) * scale).value
    assert tnlib.degenerate_groups(value) == want
    assert tnlib.degenerate_groups(tnlib.convert(value, tnlib.LowRank)) == want


def test_groups_of_every_bond_and_leg() -> None:
    ghz = oracles.ghz(4, 3)
    for value in (tnlib.tt_svd(ghz).value, tnlib.canonicalize(tnlib.tt_svd(7 * ghz).value, 1)):
        assert tnlib.degenerate_groups(value) == [[slice(0, 3)]] * 3
    assert tnlib.degenerate_groups(tnlib.tucker(ghz).value) == [[slice(0, 3)]] * 4
    w = np.zeros((2, 2, 2))
    w[[0, 0, 1], [0, 1, 0], [1, 0, 0]] = 1
    assert tnlib.degenerate_groups(tnlib.tt_svd(w).value) == [[], []]
    identity = tnlib.ttm_svd(np.eye(16), (4, 4), (4, 4)).value
    assert tnlib.degenerate_groups(identity) == [[]]  # a product: one value on its bond
    assert tnlib.degenerate_groups(tnlib.ttm_svd(swap(3), (3, 3), (3, 3)).value) == [[slice(0, 9)]]
    assert tnlib.degenerate_groups(tnlib.tt_svd(np.ones(5)).value) == []


# ------------------------------------------------------------------------------------------------------ canonical basis


@st.composite
def isometries(draw: st.DrawFn) -> tuple[np.ndarray, list[slice]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(oracles.DTYPES))
    u = oracles.isometry(sum(sizes) + draw(st.integers(0, 5)), sum(sizes), dtype, draw(st.integers(0, 999)))
    stops = list(itertools.accumulate(sizes))
    groups = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True) if size > 1]
    return u.astype(dtype), groups


@given(isometries(), st.integers(0, 999))
def test_the_basis_that_came_in_does_not_matter(case: tuple[np.ndarray, list[slice]], seed: int) -> None:
    u, groups = case
    turned = u * np.exp(1j * seed) if np.iscomplexobj(u) else -u
    for g in groups:
        turned[:, g] = u[:, g] @ oracles.isometry(g.stop - g.start, g.stop - g.start, u.dtype, seed)
    turned = turned.astype(u.dtype)
    with oracles.unchanged(u, turned):
        one, other = (tnlib.canonical_basis(a, groups) for a in (u, turned))
    assume(tnlib.nearest_tie(u, groups) > 1e3 * oracles.eps(u.dtype))
    assert one.dtype == u.dtype
    oracles.assert_isometric(one)
    for g in groups:
        oracles.assert_close(one[:, g] @ one[:, g].conj().T, u[:, g] @ u[:, g].conj().T, u.dtype)
    pivots = min([np.abs(one[:, g]).max(axis=0).min() for g in groups], default=1.0)
    assert oracles.norm(one - other) <= 100 * oracles.eps(u.dtype) * np.sqrt(u.size) / pivots
    again = tnlib.canonical_basis(one, groups)
    assert oracles.norm(one - again) <= 100 * oracles.eps(u.dtype) * np.sqrt(u.size) / pivots


@given(isometries())
def test_it_is_the_cholesky_factor_of_the_projector(case: tuple[np.ndarray, list[slice]]) -> None:
    """With the rows in the order of the pivots, it is lower triangular with a positive diagonal."""
    u, _ = case
    g = slice(0, u.shape[1])
    fixed = oracles.wide(tnlib.canonical_basis(u, [g]))
    projector = oracles.wide(u) @ oracles.wide(u).conj().T
    left = projector.copy()
    for k in range(u.shape[1]):
        lengths = np.diagonal(left).real
        lead = int(np.argmax(lengths >= (1 - 2 * np.sqrt(oracles.eps(u.dtype))) * lengths.max()))
        column = left[:, lead] / np.sqrt(left[lead, lead].real)
        assume(tnlib.nearest_tie(u, [g]) > 1e3 * oracles.eps(u.dtype))
        assert np.linalg.norm(column - fixed[:, k]) <= 1e3 * oracles.eps(u.dtype) / np.sqrt(left[lead, lead].real)
        left = left - np.outer(column, column.conj())


def test_the_basis_of_a_whole_space_is_the_identity() -> None:
    oracles.assert_close(tnlib.canonical_basis(oracles.isometry(4, 4), [slice(0, 4)]), np.eye(4))


def test_bases_whose_pivot_rows_are_nearly_parallel_are_orthonormal() -> None:
    """The pivots have one large entry in common, and what is left of each is a hundredth of it."""
    m, r = 40_000, 10
    x = np.sign(oracles.normal((m, r)))
    x[:r], x[:, 0] = 2 * oracles.normal((r, r), seed=1), 0
    x[:r, 0] = np.sqrt(m)
    basis = tnlib.canonical_basis(np.linalg.qr(x)[0] @ oracles.isometry(r, r), [slice(0, r)])
    assert np.linalg.norm(basis.T @ basis - np.eye(r)) < 64 * oracles.eps(np.float64)


# --------------------------------------------------------------------------------------------------------------- ties


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rows_of_equal_length_are_no_jump(dtype: Any) -> None:
    u = np.full((4, 1), 0.5, dtype)
    tolerance = 2 * np.sqrt(oracles.eps(dtype))
    assert tnlib.nearest_tie(u) == pytest.approx(tolerance, rel=1e-3)
    ghz = tnlib.tt_svd(oracles.ghz(3).astype(dtype)).value
    assert tnlib.nearest_tie(ghz) == pytest.approx(tolerance, rel=1e-3)


def test_at_a_tie_the_distance_is_nothing_and_the_sign_jumps() -> None:
    tolerance = 2 * np.sqrt(oracles.eps(np.float64))

    def column(beside: float) -> np.ndarray:
        squares = np.array([1 - tolerance + beside, 1.0])
        return (np.sqrt(squares / squares.sum()) * [1, -1])[:, None]

    for beside in (1e-13, 1e-11, 1e-9):
        above, below = column(beside), column(-beside)
        assert tnlib.nearest_tie(above) == pytest.approx(beside, abs=1e-14)
        assert tnlib.nearest_tie(below) == pytest.approx(beside, abs=1e-14)
        assert oracles.norm(above - below) <= 2 * beside
        assert tnlib.canonical_basis(above)[0, 0] > 0 > tnlib.canonical_basis(below)[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_basis_jumps_where_the_tie_says_so_and_nowhere_else(seed: int) -> None:
    """From one space to another in small steps: every jump is at a tie."""
    m, r, steps = 6, 2 + seed % 3, 2000
    start, end = oracles.isometry(m, r, seed=seed), oracles.isometry(m, r, seed=100 + seed)
    group = [slice(0, r)]

    def at(t: float) -> np.ndarray:
        return np.linalg.qr((1 - t) * start + t * end)[0]

    def basis(t: float) -> np.ndarray:
        return tnlib.canonical_basis(at(t), group)

    jumps = 0
    for a, b in itertools.pairwise(np.linspace(0, 1, steps + 1)):
        far = oracles.norm(basis(a) - basis(b))
        if far < 0.05:
            continue
        jumps += 1
        for _ in range(46):  # bisect down to where it happens
            middle = (a + b) / 2
            a, b = (a, middle) if oracles.norm(basis(a) - basis(middle)) > far / 2 else (middle, b)
        assert oracles.norm(basis(a) - basis(b)) > 0.02
        assert oracles.norm(at(a) @ at(a).T - at(b) @ at(b).T) < 1e-11
        assert max(tnlib.nearest_tie(at(t), group) for t in (a, b)) < 1e-10
    assert jumps > 0, "the path proves nothing"


FORMATS = {
    "SVD": tnlib.svd(oracles.with_spectrum([2, 2, 1], 6, 5)).value,
    "LowRank": tnlib.LowRank(oracles.normal((6, 3)), oracles.normal((3, 5), seed=1)),
    "TensorTrain": tnlib.TensorTrain(oracles.random_cores((3, 4, 5), (1, 3, 4, 1))),
    "TTMatrix": tnlib.ttm_svd(oracles.normal((6, 6)), (2, 3), (2, 3)).value,
    "Tucker": tnlib.Tucker(
        oracles.normal((2, 3, 2)), [oracles.normal((n, r), seed=n) for n, r in ((4, 2), (5, 3), (6, 2))]
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_nearest_tie_of_a_format_is_that_of_its_bases(kind: str) -> None:
    value = FORMATS[kind]
    groups = tnlib.degenerate_groups(value)
    lists = [groups] if kind in ("SVD", "LowRank") else groups
    match tnlib.canonical_form(value):
        case tnlib.SVD() as form:
            columns = [form.u]
        case tnlib.LowRank() as form:
            columns = [form.left / np.linalg.norm(form.left, axis=0)]
        case tnlib.Tucker() as form:
            columns = list(form.factors)
        case form:
            columns = [core.reshape(-1, core.shape[-1]) for core in form.cores[:-1]]
    want = min(tnlib.nearest_tie(u, g) for u, g in zip(columns, lists, strict=True))
    assert 0 < want < 1
    assert tnlib.nearest_tie(value) == pytest.approx(want, rel=1e-9)
    assert tnlib.nearest_tie(value, groups) == pytest.approx(want, rel=1e-9)
    # one basis for all values of a bond or leg: another one, of the same tensor
    whole = [[slice(0, u.shape[1])] for u in columns]
    chosen: Any = whole[0] if kind in ("SVD", "LowRank") else whole
    other = tnlib.canonical_form(value, groups=chosen)
    first = other.factors[0] if kind == "Tucker" else other.arrays()[0].reshape(-1, columns[0].shape[1])
    if kind != "LowRank":  # whose left factor has the singular values in it
        oracles.assert_close(first, tnlib.canonical_basis(columns[0], whole[0]), factor=1e3)
    if kind != "SVD":
        oracles.assert_close(other.full(), value.full(), factor=1e3)


# -------------------------------------------------------------------------------------------------------- wrong input


def test_what_is_wrong_is_said() -> None:
    with oracles.refused(ValueError, "degenerate_groups", "descending"):
        tnlib.degenerate_groups(np.array([1.0, 2.0]))
    with oracles.refused(ValueError, "degenerate_groups", "not negative"):
        tnlib.degenerate_groups(np.array([1.0, -2.0]))
    with oracles.refused(ValueError, "degenerate_groups", "(2, 2)"):
        tnlib.degenerate_groups(np.eye(2))
    with oracles.refused(ValueError, "degenerate_groups", "rtol", "2.0"):
        tnlib.degenerate_groups(np.ones(2), rtol=2)
    with oracles.refused(TypeError, "degenerate_groups", "CP"):
        tnlib.degenerate_groups(tnlib.CP([1.0], [np.ones((2, 1))]))
    with oracles.refused(ValueError, "canonical_basis", "orthonormal", "off by 3"):
        tnlib.canonical_basis(2 * np.eye(3))
    for wrong in (
        [slice(0, 4)],
        [slice(1, 3), slice(0, 2)],
        [slice(0, 2), slice(1, 3)],
        [slice(2, 2)],
        [slice(0, 3, 2)],
    ):
        with oracles.refused(ValueError, "canonical_basis", "groups", "3 columns"):
            tnlib.canonical_basis(np.eye(3), wrong)
    with oracles.refused(TypeError, "canonical_basis", "slices", "0"):
        tnlib.canonical_basis(np.eye(3), [0, 1])  # type: ignore[list-item]
    with oracles.refused(ValueError, "nearest_tie", "2 lists", "TensorTrain"):
        tnlib.nearest_tie(tnlib.tt_svd(oracles.ghz(3)).value, [[]])


@pytest.mark.parametrize(("d", "n"), [(3, 4), (3, 8), (3, 16), (5, 4)])
def test_normalised_states_of_many_equal_values_stay_in_place(d: int, n: int) -> None:
    """Noise of 1e-15 in every entry spreads n values of norm 1 by dozens of eps: they are a group all the same."""
    x = oracles.ghz(d, n) / np.sqrt(n)
    still = {kind: solve(x) for kind, solve in IN_ANY_BASIS.items()}
    for seed in range(30):
        noisy = x + 1e-15 * oracles.normal(x.shape, seed=seed)
        for kind, solve in IN_ANY_BASIS.items():
            for one, other in zip(still[kind], solve(noisy), strict=True):
                assert np.abs(one - other).max() <= 1e-13, kind


IN_ANY_BASIS = {
    "train": lambda x: tnlib.tt_svd(x, rtol=1e-12).value.cores,
    "rounded": lambda x: tnlib.round(tnlib.tt_svd(x).value, rtol=1e-12).value.cores,
    "canonical form": lambda x: tnlib.canonical_form(tnlib.tt_svd(x, rtol=1e-12).value).cores,
    "Tucker": lambda x: tnlib.tucker(x, rtol=1e-12).value.factors,
}


@pytest.mark.parametrize("spread", [20.0, 100.0, 200.0])
def test_values_that_nearly_agree_lose_no_digits(spread: float) -> None:
    """A basis of a group is fixed by turning the rest of the tensor with it, however far apart the values are."""
    u, v = (np.linalg.qr(oracles.normal((12, 12), seed=k))[0] for k in range(2))
    x = (u * (1 - np.arange(12) * spread * oracles.eps(np.float64) / 12)) @ v
    for value in (tnlib.tt_svd(x).value, tnlib.tucker(x).value):
        assert oracles.true_error(x, value) <= 12 * oracles.eps(np.float64)
    cube = x.reshape(4, 3, 12)
    train = tnlib.tt_svd(cube).value
    assert oracles.true_error(cube, train) <= 12 * oracles.eps(np.float64)
    for value in (tnlib.round(train).value, tnlib.canonical_form(train)):
        assert oracles.true_error(cube, value) <= 50 * oracles.eps(np.float64)
