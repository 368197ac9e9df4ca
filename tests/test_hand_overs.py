"""Methods that tnlib does not have, by the calls of docs/other-packages.md: what tnlib hands over, and back to it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tnlib_adapters import interop

import tnlib

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of these packages


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


def test_calls_of_the_table_run() -> None:
    for package in ("tenpy", "quimb", "torchtt", "teneva", "tntorch", "pyttb", "tensorly"):
        pytest.importorskip(package)
    text = (Path(__file__).parents[1] / "docs" / "other-packages.md").read_text(encoding="utf-8")
    table = text[: text.index("## Completion")]
    heisenberg = interop.quimb.from_quimb(pytest.importorskip("quimb.tensor").MPO_ham_heis(8))
    names: dict[str, Any] = {"tnlib": tnlib, "np": np, "interop": interop}
    names |= {
        "A": heisenberg + 8 * tnlib.eye((2,) * 8),
        "psi": _state(),
        "t": _train((5, 5, 5)),
        "z": _train((5, 5, 5)),
    }
    names |= {"x": np.abs(_smooth()).reshape(6, 5, 7), "y": np.ones((6, 4)), "slices": [np.eye(5)] * 3}
    names |= {"core": np.random.default_rng(0).standard_normal((3, 2, 3)), "sparse": _sparse()}
    rows = re.findall(r"^\| .* \| (.*) \|$", table, re.MULTILINE)
    calls = [call for row in rows for call in re.findall(r"`([^`]*)`", row) if re.search(r"[(=]|\w\.\w|^import ", call)]
    assert len(calls) > 40
    for call in calls:
        exec(call, names)
    assert names["energy"] == pytest.approx(names["dmrg"].energy)  # of TeNPy and quimb


def test_a_linear_system() -> None:
    torchtt = pytest.importorskip("torchtt")
    a, x = _laplacian(3), _train((4,) * 3, 2)
    b = interop.torchtt.to_torchtt(a @ x)
    found = interop.torchtt.from_torchtt(torchtt.solvers.amen_solve(interop.torchtt.to_torchtt(a), b, eps=1e-10))
    assert tnlib.distance(found, x) < 1e-6 * x.norm()


def test_the_laplacian_of_ttpy() -> None:
    torchtt = pytest.importorskip("torchtt")
    a, x = _laplacian(4), tnlib.ones((4,) * 4)
    b = interop.torchtt.to_torchtt(x)
    found = interop.torchtt.from_torchtt(torchtt.solvers.amen_solve(interop.torchtt.to_torchtt(a), b, eps=1e-10))
    assert tnlib.distance(a @ found, x) < 1e-6 * x.norm()


def test_the_lowest_eigenvalue() -> None:
    qtn = pytest.importorskip("quimb.tensor")
    a = _laplacian(2)
    dmrg = qtn.DMRG2(interop.quimb.to_quimb(a), bond_dims=[4, 8])
    dmrg.solve(verbosity=0)
    assert dmrg.energy == pytest.approx(np.linalg.eigvalsh(a.full())[0])


def test_completion() -> None:
    teneva = pytest.importorskip("teneva")
    exact = _train((8,) * 5, 2)
    points = np.random.default_rng(1).integers(0, 8, (4000, 5))
    cores = teneva.als(points, tnlib.entries(exact, points), teneva.rand([8] * 5, 3, seed=0), nswp=50)
    found = tnlib.round(interop.teneva.from_teneva(cores), max_rank=2).value
    assert tnlib.distance(found, exact) < 1e-3 * exact.norm()


def test_an_anova_fit() -> None:
    teneva = pytest.importorskip("teneva")
    points = np.stack(np.unravel_index(np.arange(125), (5, 5, 5)), axis=1)
    values = points.sum(axis=1) * 1.0
    found = interop.teneva.from_teneva(teneva.anova(points, values, 2, seed=0))
    assert np.abs(tnlib.entries(found, points) - values).max() < 1e-2


def test_the_largest_entry() -> None:
    teneva = pytest.importorskip("teneva")
    t = _train()
    found = teneva.optima_tt(interop.teneva.to_teneva(t))
    assert found[3] == pytest.approx(t.full().max())


def test_sobol_indices() -> None:
    tntorch = pytest.importorskip("tntorch")
    t = _train((4, 5, 6), 2)
    mask = tntorch.only(tntorch.symbols(3)[1])
    x = t.full() - t.full().mean()
    share = np.square(x.mean(axis=(0, 2))).mean() / np.square(x).mean()
    index = tntorch.sobol(interop.tntorch.to_tntorch(t.astype("float32")), mask)
    assert float(index) == pytest.approx(share, abs=1e-4)


def test_a_tangent_space() -> None:
    pytest.importorskip("torchtt")
    import torchtt.manifold

    t, z = _train((4, 5, 6), 2), _train((4, 5, 6), 3, 1)
    to = interop.torchtt.to_torchtt
    found = interop.torchtt.from_torchtt(torchtt.manifold.riemannian_projection(to(t), to(z)))
    assert max(found.ranks) <= 4
    assert tnlib.inner(t, z - found) == pytest.approx(0, abs=1e-8)


def test_two_sites_as_centre() -> None:
    pytest.importorskip("quimb")
    psi = _state()
    moved = interop.quimb.from_quimb(interop.quimb.to_quimb(psi).canonicalize((2, 5)))
    assert tnlib.distance(moved, psi) < 1e-12


def test_a_measurement() -> None:
    pytest.importorskip("quimb")
    outcome, after = interop.quimb.to_quimb(_state()).measure(0, remove=False)
    left = interop.quimb.from_quimb(after)
    assert tnlib.expectation(left, np.diag(np.eye(2)[outcome]), 0) == pytest.approx(1)


def test_a_cyclic_chain() -> None:
    qtn = pytest.importorskip("quimb.tensor")
    ring = qtn.MPS_rand_state(5, 3, cyclic=True, seed=0)
    bond = ring.bond(4, 0)
    parts = [ring.isel({bond: k}) for k in range(3)]
    dense = sum(part.to_dense(ring.site_inds) for part in parts).reshape((2,) * 5)
    np.testing.assert_allclose(tnlib.tt_svd(dense).value.full().ravel(), ring.to_dense().ravel(), atol=1e-12)


def test_an_infinite_chain() -> None:
    pytest.importorskip("tenpy")
    from tenpy.networks.mps import MPS
    from tenpy.networks.site import SpinHalfSite

    core = np.random.default_rng(0).standard_normal((3, 2, 3))
    sites = [SpinHalfSite(None)]
    theirs = MPS.from_Bflat(sites, [core.transpose(1, 0, 2)], bc="infinite", unit_cell_width=1)
    theirs.canonical_form()
    assert tnlib.correlation_length(core) == pytest.approx(theirs.correlation_length(), rel=1e-6)


def test_an_infinite_operator() -> None:
    pytest.importorskip("tenpy")
    from tenpy.models.tf_ising import TFIChain

    model = TFIChain({"L": 2, "bc_MPS": "infinite", "conserve": None})
    with pytest.raises(tnlib.ArgumentError, match="finite"):
        interop.tenpy.from_tenpy(model.H_MPO)
    finite = TFIChain({"L": 6, "bc_MPS": "finite", "conserve": None})
    assert interop.tenpy.from_tenpy(finite.H_MPO).shape == (64, 64)


def test_an_evolution_operator() -> None:
    pytest.importorskip("tenpy")
    from scipy.linalg import expm
    from tenpy.models.tf_ising import TFIChain

    operator = TFIChain({"L": 4, "bc_MPS": "finite", "conserve": None}).H_MPO
    step = interop.tenpy.from_tenpy(operator.make_U_II(-0.01j)).full()
    assert np.linalg.norm(step - expm(-0.01j * interop.tenpy.from_tenpy(operator).full()), 2) < 1e-2


def _tensorly(name: str) -> Any:
    return getattr(pytest.importorskip("tensorly.decomposition"), name)


def test_nonnegative_tucker() -> None:
    x = np.abs(_smooth()).reshape(6, 5, 7)
    found = interop.tensorly.from_tensorly(_tensorly("non_negative_tucker_hals")(x, rank=[4, 4, 4]))
    assert all((factor >= 0).all() for factor in found.factors)


def test_a_sparse_component() -> None:
    x = np.einsum("ir,jr,kr->ijk", *np.random.default_rng(0).standard_normal((3, 6, 2)))
    cp, sparse = _tensorly("parafac")(x, 1, sparsity=3, random_state=0)
    assert np.count_nonzero(sparse) == 3
    np.testing.assert_allclose(interop.tensorly.from_tensorly(cp).full(), cp.to_tensor())


def test_other_constraints() -> None:
    x = np.abs(_smooth()).reshape(6, 5, 7)
    cp = _tensorly("constrained_parafac")(x, 2, simplex=1, random_state=0)
    assert all((factor > -1e-9).all() for factor in cp.factors)
    assert cp.factors[0].sum(axis=0) == pytest.approx(1)
    np.testing.assert_allclose(interop.tensorly.from_tensorly(cp).full(), cp.to_tensor())


def test_fixed_modes() -> None:
    x = np.einsum("ir,jr,kr->ijk", *np.random.default_rng(0).standard_normal((3, 6, 2)))
    init = interop.tensorly.to_tensorly(tnlib.cp(x, 2).value)
    found = interop.tensorly.from_tensorly(_tensorly("parafac")(x, 2, init=init, fixed_modes=[0]))
    for one, other in zip(found.factors[0].T, init.factors[0].T, strict=True):
        assert abs(one @ other) == pytest.approx(np.linalg.norm(one) * np.linalg.norm(other))
    assert np.linalg.norm(found.full() - x) < 1e-6 * np.linalg.norm(x)


def test_slices_of_unequal_sizes() -> None:
    parafac2 = _tensorly("parafac2")
    from tensorly.parafac2_tensor import parafac2_to_slices

    rng = np.random.default_rng(0)
    b, c = rng.standard_normal((2, 2)), rng.standard_normal((4, 2))
    isometries = [np.linalg.qr(rng.standard_normal((5 + k, 2)))[0] for k in range(3)]
    slices = [p @ b * rng.uniform(1, 2, 2) @ c.T for p in isometries]
    found = parafac2_to_slices(parafac2(slices, rank=2, random_state=0, n_iter_max=500))
    for one, other in zip(found, slices, strict=True):
        assert np.linalg.norm(one - other) < 1e-2 * np.linalg.norm(other)


def test_a_coupled_factorization() -> None:
    rng = np.random.default_rng(0)
    a, b, c, d = rng.standard_normal((4, 6, 2))
    x, y = np.einsum("ir,jr,kr->ijk", a, b, c), a @ d.T
    found = _tensorly("coupled_matrix_tensor_3d_factorization")(x, y, 2)
    assert np.linalg.norm(interop.tensorly.from_tensorly(found[0]).full() - x) < 1e-2 * np.linalg.norm(x)


def test_a_ring() -> None:
    x = np.random.default_rng(0).standard_normal((4, 5, 6))
    np.testing.assert_allclose(_tensorly("tensor_ring")(x, rank=[2, 2, 10, 2]).to_tensor(), x, atol=1e-12)


def test_a_robust_decomposition() -> None:
    x = _smooth().reshape(6, 5, 7)
    spoiled = x.copy()
    spoiled[1, 2, 3] += 10
    low_rank, sparse = _tensorly("robust_pca")(spoiled)
    assert np.unravel_index(np.abs(sparse).argmax(), x.shape) == (1, 2, 3)
    assert np.linalg.norm(tnlib.tucker(low_rank, ranks=(4, 5, 7)).value.full() - x) < 0.1 * np.linalg.norm(x)


def _sparse() -> Any:
    pyttb = pytest.importorskip("pyttb")
    where = np.random.default_rng(0).integers(0, 5, (30, 3))
    return pyttb.sptensor.from_aggregator(where, np.ones((30, 1)), (5, 5, 5))


def test_cp_of_a_sparse_array() -> None:
    pyttb = pytest.importorskip("pyttb")
    found = interop.pyttb.from_pyttb(pyttb.cp_als(_sparse(), 2, printitn=0)[0])
    assert found.shape == (5, 5, 5)


def test_counts() -> None:
    pyttb = pytest.importorskip("pyttb")
    found = interop.pyttb.from_pyttb(pyttb.cp_apr(_sparse(), 2, printitn=0, printinneritn=0)[0])
    assert all((factor >= 0).all() for factor in found.factors)


def test_text_files() -> None:
    pyttb = pytest.importorskip("pyttb")
    exact = tnlib.random.cp((4, 5, 6), 2, rng=0)
    with tempfile.TemporaryDirectory() as folder:
        pyttb.export_data(interop.pyttb.to_pyttb(exact), f"{folder}/cp.txt")
        found = interop.pyttb.from_pyttb(pyttb.import_data(f"{folder}/cp.txt"))
    np.testing.assert_allclose(found.full(), exact.full(), atol=1e-12)
