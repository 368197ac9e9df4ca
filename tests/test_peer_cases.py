"""Cases from tests and tutorials of other libraries that version 0.2.0 could not express, and what does each now.

`HERE` are computed by tnlib. `ELSEWHERE` are those of methods that tnlib does not have: the package of docs/choose.md
computes them from the objects that tnlib hands over, and takes the result back where it is one of its formats.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tnlib_adapters import interop

import tnlib

HERE: list[Any] = []
ELSEWHERE: list[Any] = []
Case = Callable[[], None]


def here(source: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        HERE.append(pytest.param(case, id=f"{source}: {case.__name__.strip('_')}"))
        return case

    return add


def elsewhere(package: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        ELSEWHERE.append(pytest.param(package, case, id=f"{package}: {case.__name__.strip('_')}"))
        return case

    return add


def _train(shape: tuple[int, ...] = (4, 5, 6), rank: int = 3, seed: int = 0) -> tnlib.TensorTrain:
    return tnlib.random.tensor_train(shape, rank, rng=seed)


def _state(d: int = 8, rank: int = 4) -> tnlib.TensorTrain:
    psi = _train((2,) * d, rank)
    return psi / psi.norm()


def _laplacian(d: int) -> tnlib.TTMatrix:
    line = 2 * np.eye(4) - np.eye(4, k=1) - np.eye(4, k=-1)
    return sum(tnlib.embed(line, k, (4,) * d) for k in range(d))


def _smooth() -> np.ndarray:
    return np.random.default_rng(0).random((6, 4)) @ np.random.default_rng(1).random((4, 35))


# ---- crosses


@here("TensorCrossInterpolation")
def _a_cap_on_the_ranks() -> None:
    fit = tnlib.tt_cross(lambda p: np.exp(-p.sum(axis=1) / 10) + 1 / (1 + p.sum(axis=1)), (10,) * 5, rtol=1, max_rank=1)
    assert fit.value.ranks == (1,) * 6


@here("TensorCrossInterpolation")
def _a_hundred_boxes_at_known_positions() -> None:
    places = np.random.default_rng(0).integers(0, 2, (100, 40))

    def f(points: np.ndarray) -> np.ndarray:
        return (points[:, None, :30] == places[None, :, :30]).all(axis=2).sum(axis=1).astype(float)

    fit = tnlib.tt_cross(f, (2,) * 40, rtol=1e-6, pivots=places)
    np.testing.assert_allclose(tnlib.entries(fit.value, places), f(places), atol=1e-6)


@here("TensorCrossInterpolation")
def _a_spike_at_a_known_position() -> None:
    spike = np.arange(40)[None] % 2
    fit = tnlib.tt_cross(lambda p: (p == spike).all(axis=1) * 1.0, (2,) * 40, rtol=1e-6, pivots=spike)
    assert fit.value[tuple(spike[0])] == pytest.approx(1)


@here("TensorCrossInterpolation")
def _a_matrix_at_rank_five() -> None:
    a = np.random.default_rng(0).standard_normal((30, 20)) @ np.diag(0.5 ** np.arange(20))
    with pytest.warns(tnlib.ConvergenceWarning, match="max_rank=5"):
        fit = tnlib.tt_cross(lambda p: a[tuple(p.T)], a.shape, rtol=1e-9, max_rank=5)
    assert fit.value.ranks == (1, 5, 1)


@here("teneva")
def _a_callback_that_stops_a_cross() -> None:
    seen: list[int] = []

    def stop(fit: tnlib.Fit) -> None:
        seen.append(fit.n_calls)
        raise StopIteration

    with pytest.warns(tnlib.ConvergenceWarning):
        tnlib.tt_cross(lambda p: 1 / (1 + p.sum(axis=1)), (20,) * 4, rtol=1e-9, callback=stop)
    assert len(seen) == 1


@here("teneva")
def _the_number_of_evaluations() -> None:
    seen: list[int] = []

    def f(points: np.ndarray) -> np.ndarray:
        seen.append(len(points))
        return 1 / (1 + points.sum(axis=1))

    assert tnlib.tt_cross(f, (20,) * 4, rtol=1e-6).n_calls == sum(seen)


@here("tensorly")
def _prescribed_ranks_of_a_cross() -> None:
    exact = _train((3,) * 6, 4)
    fit = tnlib.tt_cross(lambda p: tnlib.entries(exact, p), exact.shape, rtol=1e-9)
    assert tnlib.round(fit.value, max_rank=(2, 2, 3, 2, 2)).value.ranks == (1, 2, 2, 3, 2, 2, 1)


# ---- trains


@here("torchTT")
def _permuted_legs() -> None:
    t = _train()
    np.testing.assert_allclose(tnlib.permute(t, (2, 0, 1)).full(), t.full().transpose(2, 0, 1), atol=1e-12)


@here("torchTT")
def _broadcasting() -> None:
    t, u = _train(), _train((5, 6), 2, 1)
    np.testing.assert_allclose((t + tnlib.outer(tnlib.ones((4,)), u)).full(), t.full() + u.full(), atol=1e-12)


@here("torchTT")
def _binary_digits_and_back() -> None:
    t = _train((8, 16), 3)
    bits = tnlib.reshape(t, (2,) * 7)
    np.testing.assert_allclose(bits.full(), t.full().reshape((2,) * 7), atol=1e-12)
    np.testing.assert_allclose(tnlib.reshape(bits, (8, 16)).full(), t.full(), atol=1e-12)


@here("torchTT")
def _a_reshaped_operator() -> None:
    a = tnlib.random.tt_matrix((4, 6), (4, 9), 3, rng=0)
    split = tnlib.reshape(a, ((2, 2, 2, 3), (2, 2, 3, 3)))
    np.testing.assert_allclose(split.full(), a.full(), atol=1e-12)


@here("torchTT")
def _padding() -> None:
    t = _train()
    padded = tnlib.concatenate([t, tnlib.zeros((4, 2, 6))], axis=1)
    np.testing.assert_allclose(padded.full(), np.pad(t.full(), ((0, 0), (0, 2), (0, 0))), atol=1e-12)


@here("torchTT")
def _the_diagonal_of_an_operator_and_back() -> None:
    t = _train()
    np.testing.assert_allclose(tnlib.diag(t).full(), np.diag(t.full().ravel()), atol=1e-12)
    np.testing.assert_allclose(tnlib.diag(tnlib.diag(t)).full(), t.full(), atol=1e-12)


@here("tntorch")
def _one_entry_set() -> None:
    t, i = _train(), (1, 2, 3)
    unit = tnlib.product_state([np.eye(n)[k] for n, k in zip(t.shape, i, strict=True)])
    want = t.full()
    want[i] = 7
    np.testing.assert_allclose((t + (7 - t[i]) * unit).full(), want, atol=1e-12)


@here("TensorCrossInterpolation")
def _a_train_through_two_values() -> None:
    shape, points, values = (4, 4, 4), [(0, 1, 2), (3, 2, 1)], [1.0, -2.0]
    units = [tnlib.product_state([np.eye(n)[k] for n, k in zip(shape, i, strict=True)]) for i in points]
    found = values[0] * units[0] + values[1] * units[1]
    np.testing.assert_allclose(tnlib.entries(found, points), values)


@here("teneva")
def _interface_vectors_and_the_gradient_of_an_entry() -> None:
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


@here("tntorch")
def _a_batch_of_trains() -> None:
    batch = np.random.default_rng(0).standard_normal((3, 4, 5, 6))
    trains = [tnlib.tt_svd(x).value for x in batch]
    np.testing.assert_allclose(np.stack([t.full() for t in trains]), batch, atol=1e-12)


# ---- physics


@here("quimb")
def _an_operator_on_three_distant_sites() -> None:
    psi, gate = _state(6), np.random.default_rng(0).standard_normal((8, 8))
    found = tnlib.apply(tnlib.embed(gate, (4, 1, 3), psi.shape), psi).value.full()
    want = np.tensordot(gate.reshape((2,) * 6), psi.full(), ([3, 4, 5], [4, 1, 3]))
    np.testing.assert_allclose(found, np.moveaxis(want, [0, 1, 2], [4, 1, 3]), atol=1e-12)


@here("quimb")
def _a_gate_with_two_controls() -> None:
    toffoli = np.eye(8)[[0, 1, 2, 3, 4, 5, 7, 6]]
    start = tnlib.product_state(np.eye(2)[[1, 0, 1, 0, 0]])
    turned = tnlib.apply(tnlib.embed(toffoli, (0, 2, 4), start.shape), start).value
    assert turned[1, 0, 1, 0, 1] == pytest.approx(1)


@here("TeNPy")
def _permuted_sites() -> None:
    psi = _state(6)
    np.testing.assert_allclose(tnlib.permute(psi, range(5, -1, -1)).full(), psi.full().T, atol=1e-12)


@here("TeNPy")
def _a_segment_with_open_ends() -> None:
    psi = tnlib.canonicalize(_state(), 3)
    cores = psi.cores[2:6]
    ends = np.eye(len(cores[0]))[None], np.eye(cores[-1].shape[2])[..., None]
    segment = tnlib.TensorTrain([ends[0], *cores, ends[1]], center=2)
    assert tnlib.entropy(segment, 2) == pytest.approx(tnlib.entropy(psi, 3))


# ---- Tucker and CP


@here("tensorly")
def _tucker_from_given_factors() -> None:
    x = np.random.default_rng(0).standard_normal((6, 7, 8))
    first = tnlib.tucker(x, ranks=3).value
    assert tnlib.tucker(x, init=first, n_iter=20).error <= tnlib.tucker(x, ranks=3).error


def _masked() -> tuple[np.ndarray, Any]:
    rng = np.random.default_rng(0)
    x = np.einsum("ir,jr,kr->ijk", *(rng.standard_normal((12, 3)) for _ in range(3)))
    return x, np.ma.array(x, mask=rng.random(x.shape) < 0.3)


@here("tensorly")
def _tucker_of_known_entries() -> None:
    x, masked = _masked()
    fit = tnlib.tucker(masked, max_rank=3, n_iter=500)
    assert np.linalg.norm(fit.value.full() - x) < 1e-3 * np.linalg.norm(x)


@here("tensorly")
def _cp_of_known_entries() -> None:
    x, masked = _masked()
    assert np.linalg.norm(tnlib.cp(masked, 3, n_starts=3).value.full() - x) < 1e-3 * np.linalg.norm(x)


@here("tensorly")
def _cp_from_given_factors() -> None:
    x, _ = _masked()
    with pytest.warns(tnlib.ConvergenceWarning):
        first = tnlib.cp(x, 3, n_iter=2).value
    assert tnlib.cp(x, 3, init=first).error < 1e-6


@here("tensorly")
def _complex_cp_of_a_higher_rank() -> None:
    rng = np.random.default_rng(1234)
    factors = [rng.standard_normal((n, 3)) + 1j * rng.standard_normal((n, 3)) for n in (3, 4, 2)]
    x = np.einsum("ir,jr,kr->ijk", *factors)
    assert tnlib.cp(x, 4, n_starts=5).error < 1e-2


@here("pyttb")
def _a_tucker_times_a_matrix() -> None:
    t, m = tnlib.random.tucker((4, 5, 6), 2, rng=0), np.random.default_rng(0).standard_normal((3, 5))
    product = tnlib.Tucker(t.core, [t.factors[0], m @ t.factors[1], t.factors[2]])
    np.testing.assert_allclose(product.full(), np.einsum("ijk,mj->imk", t.full(), m), atol=1e-12)


# ---- methods of other packages


@elsewhere("torchtt")
def _a_linear_system() -> None:
    import torchtt

    a, x = _laplacian(3), _train((4,) * 3, 2)
    b = interop.torchtt.to_torchtt(a @ x)
    found = interop.torchtt.from_torchtt(torchtt.solvers.amen_solve(interop.torchtt.to_torchtt(a), b, eps=1e-10))
    assert tnlib.distance(found, x) < 1e-6 * x.norm()


@elsewhere("torchtt")
def _the_laplacian_of_ttpy() -> None:
    import torchtt

    a, x = _laplacian(4), tnlib.ones((4,) * 4)
    b = interop.torchtt.to_torchtt(x)
    found = interop.torchtt.from_torchtt(torchtt.solvers.amen_solve(interop.torchtt.to_torchtt(a), b, eps=1e-10))
    assert tnlib.distance(a @ found, x) < 1e-6 * x.norm()


@elsewhere("quimb")
def _the_lowest_eigenvalue() -> None:
    qtn = pytest.importorskip("quimb.tensor")
    a = _laplacian(2)
    dmrg = qtn.DMRG2(interop.quimb.to_quimb(a), bond_dims=[4, 8])
    dmrg.solve(verbosity=0)
    assert dmrg.energy == pytest.approx(np.linalg.eigvalsh(a.full())[0])


@elsewhere("teneva")
def _completion() -> None:
    import teneva

    exact = _train((8,) * 5, 2)
    points = np.random.default_rng(1).integers(0, 8, (4000, 5))
    cores = teneva.als(points, tnlib.entries(exact, points), teneva.rand([8] * 5, 3, seed=0), nswp=50)
    found = tnlib.round(interop.teneva.from_teneva(cores), max_rank=2).value
    assert tnlib.distance(found, exact) < 1e-3 * exact.norm()


@elsewhere("teneva")
def _an_anova_fit() -> None:
    import teneva

    points = np.stack(np.unravel_index(np.arange(125), (5, 5, 5)), axis=1)
    values = points.sum(axis=1) * 1.0
    found = interop.teneva.from_teneva(teneva.anova(points, values, 2, seed=0))
    assert np.abs(tnlib.entries(found, points) - values).max() < 1e-2


@elsewhere("teneva")
def _the_largest_entry() -> None:
    import teneva

    t = _train()
    found = teneva.optima_tt(interop.teneva.to_teneva(t))
    assert found[3] == pytest.approx(t.full().max())


@elsewhere("tntorch")
def _sobol_indices() -> None:
    import tntorch

    t = _train((4, 5, 6), 2)
    mask = tntorch.only(tntorch.symbols(3)[1])
    x = t.full() - t.full().mean()
    share = np.square(x.mean(axis=(0, 2))).mean() / np.square(x).mean()
    index = tntorch.sobol(interop.tntorch.to_tntorch(t.astype("float32")), mask)
    assert float(index) == pytest.approx(share, abs=1e-4)


@elsewhere("torchtt")
def _a_tangent_space() -> None:
    import torchtt.manifold

    t, z = _train((4, 5, 6), 2), _train((4, 5, 6), 3, 1)
    to = interop.torchtt.to_torchtt
    found = interop.torchtt.from_torchtt(torchtt.manifold.riemannian_projection(to(t), to(z)))
    assert max(found.ranks) <= 4
    assert tnlib.inner(t, z - found) == pytest.approx(0, abs=1e-8)


@elsewhere("quimb")
def _two_sites_as_centre() -> None:
    pytest.importorskip("quimb")
    psi = _state()
    moved = interop.quimb.from_quimb(interop.quimb.to_quimb(psi).canonicalize((2, 5)))
    assert tnlib.distance(moved, psi) < 1e-12


@elsewhere("quimb")
def _a_measurement() -> None:
    pytest.importorskip("quimb")
    outcome, after = interop.quimb.to_quimb(_state()).measure(0, remove=False)
    left = interop.quimb.from_quimb(after)
    assert tnlib.expectation(left, np.diag(np.eye(2)[outcome]), 0) == pytest.approx(1)


@elsewhere("quimb")
def _a_cyclic_chain() -> None:
    qtn = pytest.importorskip("quimb.tensor")
    ring = qtn.MPS_rand_state(5, 3, cyclic=True, seed=0)
    bond = ring.bond(4, 0)
    parts = [ring.isel({bond: k}) for k in range(3)]
    dense = sum(part.to_dense(ring.site_inds) for part in parts).reshape((2,) * 5)
    np.testing.assert_allclose(tnlib.tt_svd(dense).value.full().ravel(), ring.to_dense().ravel(), atol=1e-12)


@elsewhere("tenpy")
def _an_infinite_chain() -> None:
    from tenpy.networks.mps import MPS
    from tenpy.networks.site import SpinHalfSite

    core = np.random.default_rng(0).standard_normal((3, 2, 3))
    sites = [SpinHalfSite(None)]
    theirs = MPS.from_Bflat(sites, [core.transpose(1, 0, 2)], bc="infinite", unit_cell_width=1)
    theirs.canonical_form()
    assert tnlib.correlation_length(core) == pytest.approx(theirs.correlation_length(), rel=1e-6)


@elsewhere("tenpy")
def _an_infinite_operator() -> None:
    from tenpy.models.tf_ising import TFIChain

    model = TFIChain({"L": 2, "bc_MPS": "infinite", "conserve": None})
    with pytest.raises(tnlib.ArgumentError, match="finite"):
        interop.tenpy.from_tenpy(model.H_MPO)
    finite = TFIChain({"L": 6, "bc_MPS": "finite", "conserve": None})
    assert interop.tenpy.from_tenpy(finite.H_MPO).shape == (64, 64)


@elsewhere("tenpy")
def _a_purification() -> None:
    from tenpy.networks.purification_mps import PurificationMPS
    from tenpy.networks.site import SpinHalfSite

    sites = [SpinHalfSite(None)] * 4
    state = PurificationMPS.from_infiniteT(sites, bc="finite", unit_cell_width=4)
    assert state.entanglement_entropy().max() < 1e-12


@elsewhere("tenpy")
def _an_evolution_operator() -> None:
    from scipy.linalg import expm
    from tenpy.models.tf_ising import TFIChain

    operator = TFIChain({"L": 4, "bc_MPS": "finite", "conserve": None}).H_MPO
    step = interop.tenpy.from_tenpy(operator.make_U_II(-0.01j)).full()
    assert np.linalg.norm(step - expm(-0.01j * interop.tenpy.from_tenpy(operator).full()), 2) < 1e-2


def _tensorly(name: str) -> Any:
    return getattr(pytest.importorskip("tensorly.decomposition"), name)


@elsewhere("tensorly")
def _nonnegative_tucker() -> None:
    x = np.abs(_smooth()).reshape(6, 5, 7)
    found = interop.tensorly.from_tensorly(_tensorly("non_negative_tucker_hals")(x, rank=[4, 4, 4]))
    assert all((factor >= 0).all() for factor in found.factors)


@elsewhere("tensorly")
def _a_sparse_component() -> None:
    x = np.einsum("ir,jr,kr->ijk", *np.random.default_rng(0).standard_normal((3, 6, 2)))
    cp, sparse = _tensorly("parafac")(x, 2, sparsity=0.01, random_state=0)
    assert interop.tensorly.from_tensorly(cp).shape == sparse.shape == x.shape


@elsewhere("tensorly")
def _other_constraints() -> None:
    x = np.abs(_smooth()).reshape(6, 5, 7)
    cp = interop.tensorly.from_tensorly(_tensorly("constrained_parafac")(x, 2, simplex=1, random_state=0))
    np.testing.assert_allclose(np.abs((cp.factors[0] / cp.factors[0].sum(axis=0)).sum(axis=0)), 1)


@elsewhere("tensorly")
def _fixed_modes() -> None:
    x = np.einsum("ir,jr,kr->ijk", *np.random.default_rng(0).standard_normal((3, 6, 2)))
    init = interop.tensorly.to_tensorly(tnlib.cp(x, 2).value)
    found = _tensorly("parafac")(x, 2, init=init, fixed_modes=[0])
    assert interop.tensorly.from_tensorly(found).shape == x.shape


@elsewhere("tensorly")
def _slices_of_unequal_sizes() -> None:
    slices = [np.random.default_rng(k).standard_normal((5 + k, 4)) for k in range(3)]
    assert len(_tensorly("parafac2")(slices, rank=2, random_state=0).projections) == 3


@elsewhere("tensorly")
def _a_coupled_factorization() -> None:
    pytest.importorskip("tensorly")
    from tensorly.decomposition import coupled_matrix_tensor_3d_factorization

    rng = np.random.default_rng(0)
    a, b, c, d = rng.standard_normal((4, 6, 2))
    found = coupled_matrix_tensor_3d_factorization(np.einsum("ir,jr,kr->ijk", a, b, c), a @ d.T, 2)
    assert interop.tensorly.from_tensorly(found[0]).shape == (6, 6, 6)


@elsewhere("tensorly")
def _a_ring() -> None:
    ring = _tensorly("tensor_ring")(np.random.default_rng(0).standard_normal((4, 5, 6)), rank=[2, 2, 3, 2])
    assert ring.shape == (4, 5, 6)


@elsewhere("tensorly")
def _a_robust_decomposition() -> None:
    low_rank, _ = _tensorly("robust_pca")(_smooth().reshape(6, 5, 7), n_iter_max=20)
    assert tnlib.tucker(low_rank, ranks=4).value.shape == (6, 5, 7)


@elsewhere("tensorly")
def _a_regression() -> None:
    pytest.importorskip("tensorly")
    from tensorly.regression import CPRegressor

    x = np.random.default_rng(0).standard_normal((40, 4, 3))
    y = x.reshape(40, -1) @ np.arange(12.0)
    assert CPRegressor(weight_rank=2, verbose=0).fit(x, y).predict(x).shape == y.shape


def _sparse() -> Any:
    pyttb = pytest.importorskip("pyttb")
    where = np.random.default_rng(0).integers(0, 5, (30, 3))
    return pyttb.sptensor.from_aggregator(where, np.ones((30, 1)), (5, 5, 5))


@elsewhere("pyttb")
def _cp_of_a_sparse_array() -> None:
    import pyttb

    found = interop.pyttb.from_pyttb(pyttb.cp_als(_sparse(), 2, printitn=0)[0])
    assert found.shape == (5, 5, 5)


@elsewhere("pyttb")
def _counts() -> None:
    import pyttb

    found = interop.pyttb.from_pyttb(pyttb.cp_apr(_sparse(), 2, printitn=0, printinneritn=0)[0])
    assert all((factor >= 0).all() for factor in found.factors)


@elsewhere("pyttb")
def _text_files() -> None:
    import pyttb

    exact = tnlib.random.cp((4, 5, 6), 2, rng=0)
    with tempfile.TemporaryDirectory() as folder:
        pyttb.export_data(interop.pyttb.to_pyttb(exact), f"{folder}/cp.txt")
        found = interop.pyttb.from_pyttb(pyttb.import_data(f"{folder}/cp.txt"))
    np.testing.assert_allclose(found.full(), exact.full(), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("case", HERE)
def test_computed_here(case: Case) -> None:
    case()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "case"), ELSEWHERE)
def test_handed_over(package: str, case: Case) -> None:
    pytest.importorskip(package)
    case()
