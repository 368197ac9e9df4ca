"""Trains, Tucker and CP of other libraries: what they hold, multiplied out by themselves, is what tnlib holds."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import mostly_slow

import tnlib

torch = pytest.importorskip("torch")


def library(name: str) -> Any:
    """The library itself, or a skip; torchTT warns where its compiled part is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return pytest.importorskip(name)


def verbs(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """to_X and from_X under their pinned names; a skip where X is not installed."""
    library(name)
    module = importlib.import_module(f"tnlib_adapters.interop.{name}")
    return getattr(module, f"to_{name}"), getattr(module, f"from_{name}")


def contracted(model: Any) -> np.ndarray:
    """The nodes of a model of TensorKrowch, contracted by the names of their axes: features first, or inputs first."""
    out = model.left_node.tensor.detach()[None]
    for node in model.mats_env:
        legs = [name for name in ("left", "input", "output", "right") if name in node.axes_names]
        core = node.tensor.detach().permute([node.axes_names.index(name) for name in legs])
        out = torch.tensordot(out, core, 1)
    dense = torch.tensordot(out, model.right_node.tensor.detach(), 1)[0].numpy()
    step = len(legs) - 2
    return dense.transpose([k for start in range(step) for k in range(start, dense.ndim, step)])


def dense_by(name: str, obj: Any, value: Any) -> np.ndarray:
    """The dense array, or matrix, as the library itself computes it."""
    matrix = isinstance(value, tnlib.TTMatrix)
    match name:
        case "tensorly":
            return np.asarray(obj.to_matrix() if matrix else obj.to_tensor())
        case "tensorkrowch":
            return contracted(obj).reshape(value.shape)
        case "tntorch":
            return obj.torch().numpy().reshape(value.shape)
        case "torchtt":
            return obj.full().numpy().reshape(value.shape)
        case "teneva":
            return library("teneva").full(obj)
        case "pyttb":
            return obj.full().data
        case "quimb":
            return np.asarray(obj.to_dense() if matrix else obj.to_dense(*([index] for index in obj.site_inds)))
    raise AssertionError(name)


TRAINS = ["tensorly", "tensorkrowch", "tntorch", "torchtt", "teneva", "quimb"]
MATRICES = ["tensorly", "tensorkrowch", "tntorch", "torchtt", "quimb"]

sites = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=2, max_size=4)
dtypes = st.sampled_from(oracles.DTYPES)


def random_train(shape: Sequence[tuple[int, int, int]], dtype: Any, kind: Any, seed: int) -> Any:
    ranks = [1, *(r for r, _, _ in shape[1:]), 1]
    legs = [(m,) if kind is tnlib.TensorTrain else (m, n) for _, m, n in shape]
    return kind([oracles.normal((ranks[k], *legs[k], ranks[k + 1]), dtype, seed + k) for k in range(len(shape))])


@pytest.mark.parametrize("name", TRAINS)
def test_formats_of_tensors_are_refused(name: str) -> None:
    with oracles.refused(TypeError, f"to_{name}", "numpy arrays", "to_numpy()"):
        verbs(name)[0](tnlib.TensorTrain([torch.ones(1, 2, 1)]))


CASES = [(name, tnlib.TensorTrain) for name in TRAINS] + [(name, tnlib.TTMatrix) for name in MATRICES]


@pytest.mark.parametrize(("name", "kind"), mostly_slow(CASES, CASES[::3]), ids=lambda x: getattr(x, "__name__", x))
@given(shape=sites, dtype=dtypes, seed=st.integers(0, 99), center=st.integers(0, 3) | st.none())
def test_trains_go_out_and_come_back(
    name: str, kind: Any, shape: Any, dtype: Any, seed: int, center: int | None
) -> None:
    to_library, from_library = verbs(name)
    value = random_train(shape, dtype, kind, seed)
    if center is not None:
        value = tnlib.canonicalize(value, center % len(shape))
    obj = to_library(value)
    oracles.assert_close(dense_by(name, obj, value), oracles.contract(value), dtype, 256)
    back = from_library(obj)
    assert type(back) is kind
    assert back.dtype == value.dtype
    assert value.center is None or back.center is not None
    for mine, theirs in zip(value.cores, back.cores, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("center", [None, 1])
def test_the_scale_goes_into_the_cores(name: str, kind: Any, center: int | None) -> None:
    to_library, from_library = verbs(name)
    cores = tnlib.canonicalize(random_train([(1, 2, 2), (2, 3, 2), (2, 2, 2)], np.float64, kind, 0), 1).cores
    back = from_library(to_library(kind(cores, center, -600.0)))
    assert back.center == center
    assert tnlib.distance(back, kind(cores, center, -600.0)) <= 1e-14 * back.norm()
    if name != "quimb":  # whose networks have an exponent
        with oracles.refused(ValueError, f"to_{name}: value must fit float64", "log_norm()"):
            to_library(kind(cores, center, 5000.0))


@pytest.mark.parametrize("name", TRAINS)
@oracles.each_dtype
def test_every_scale_and_zero(name: str, dtype: Any) -> None:
    to_library, from_library = verbs(name)
    cores = oracles.random_cores((2, 3, 2), (1, 2, 2, 1), dtype)
    for power in (0, 100, -100) if dtype.name in ("float32", "complex64") else (0, 660, -660):
        scaled = [cores[0] * dtype.type(2.0**power), cores[1], cores[2] * 0 if power == 0 else cores[2]]
        back = from_library(to_library(tnlib.TensorTrain(scaled)))
        want = tnlib.TensorTrain(scaled)
        assert tnlib.distance(back, want) <= 4 * oracles.eps(dtype) * want.norm()


@pytest.mark.parametrize("name", TRAINS)
def test_copies_on_both_ways(name: str) -> None:
    to_library, from_library = verbs(name)
    cores = oracles.random_cores((2, 3, 2), (1, 2, 2, 1))
    value = tnlib.TensorTrain(cores)
    with oracles.unchanged(*cores):
        obj = to_library(value)
        for core in obj if name in ("teneva", "tensorly") else getattr(obj, "tensors", None) or obj.cores:
            (core.data if name in ("tensorkrowch", "quimb") else core)[...] = 7
        oracles.assert_close(value.full(), oracles.dense_train(cores))
    back = from_library(to_library(value))
    assert not any(np.shares_memory(a, b) for a, b in zip(back.cores, cores, strict=True))


# --------------------------------------------------------------------------------------------------- Tucker and CP


@st.composite
def tuckers(draw: Any) -> tnlib.Tucker:
    shape = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=2, max_size=4))
    dtype, seed = draw(dtypes), draw(st.integers(0, 99))
    core = oracles.normal([r for _, r in shape], dtype, seed)
    return tnlib.Tucker(core, [oracles.normal(nr, dtype, seed + k) for k, nr in enumerate(shape)])


@st.composite
def cps(draw: Any) -> tnlib.CP:
    shape, rank = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)), draw(st.integers(1, 4))
    dtype, seed = draw(dtypes), draw(st.integers(0, 99))
    weights = oracles.normal((rank,), np.zeros(0, dtype).real.dtype if draw(st.booleans()) else dtype, seed)
    return tnlib.CP(weights, [oracles.normal((n, rank), dtype, seed + k) for k, n in enumerate(shape)])


@pytest.mark.parametrize("name", mostly_slow(["tensorly", "pyttb"], ["tensorly"]))
@given(value=tuckers() | cps())
def test_tucker_and_cp_go_out_and_come_back(name: str, value: Any) -> None:
    to_library, from_library = verbs(name)
    if name == "pyttb" and isinstance(value, tnlib.CP) and value.dtype != np.float64:
        with oracles.refused(TypeError, "to_pyttb: value must be float64", str(value.dtype)):
            to_library(value)
        return
    obj = to_library(value)
    oracles.assert_close(dense_by(name, obj, value), oracles.contract(value), value.dtype, 256)
    oracles.assert_same_bits(from_library(obj), value)


@given(value=tuckers() | cps())
def test_tucker_and_cp_in_tntorch(value: Any) -> None:
    to_library, from_library = verbs("tntorch")
    obj = to_library(value)
    back = from_library(obj)
    want = oracles.contract(value)
    assert isinstance(back, tnlib.CP if isinstance(value, tnlib.CP) else tnlib.TensorTrain)
    assert back.dtype == value.dtype
    scale = max(1.0, np.prod([oracles.norm(a) for a in value.arrays()]) / oracles.norm(want))
    oracles.assert_close(obj.torch().numpy(), want, value.dtype, 256 * scale)
    oracles.assert_close(back.full(), want, value.dtype, 256 * scale)


# --------------------------------------------------------------------------------- what the libraries made themselves


@pytest.mark.parametrize("backend", ["numpy", "pytorch"])
def test_decompositions_of_tensorly(backend: str) -> None:
    tl = library("tensorly")
    to_library, from_library = verbs("tensorly")
    from tensorly.decomposition import parafac, tensor_train, tensor_train_matrix, tucker

    x = oracles.random_cp((4, 3, 5), 2)
    with tl.backend_context(backend):
        a = tl.tensor(x)
        for obj in (
            tensor_train(a, [1, 2, 2, 1]),
            tucker(a, rank=[2, 2, 2]),
            parafac(a, rank=2),
            list(tensor_train(a, [1, 2, 2, 1])),
        ):
            value = from_library(obj)
            oracles.assert_close(value.full(), x, factor=1e9)
            again = to_library(value)
            assert tl.is_tensor(again[0])
            oracles.assert_same_bits(from_library(again), value)
        matrix = tensor_train_matrix(tl.tensor(x.reshape(2, 2, 3, 5)[:, :, :, :4]), [1, 6, 1])
        oracles.assert_close(from_library(matrix).full(), tl.to_numpy(matrix.to_matrix()))


def test_weights_that_tensorly_leaves_out() -> None:
    tl = library("tensorly")
    _, from_library = verbs("tensorly")
    factors = [oracles.normal((n, 2), np.complex64, n) for n in (3, 4)]
    obj = tl.cp_tensor.CPTensor((None, factors))
    obj.weights = None
    value = from_library(obj)
    assert value.weights.dtype == np.float32
    oracles.assert_close(value.full(), factors[0] @ factors[1].T, np.complex64)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_states_and_operators_of_tensorkrowch() -> None:
    tk = library("tensorkrowch")
    _, from_library = verbs("tensorkrowch")
    x = torch.from_numpy(oracles.normal((2, 3, 4)))
    oracles.assert_close(from_library(tk.models.MPS(tensors=tk.decompositions.vec_to_mps(x, rank=6))).full(), x)
    # inputs and outputs alternate
    a = torch.from_numpy(oracles.normal((2, 3, 4, 2)))
    mpo = tk.models.MPO(tensors=tk.decompositions.mat_to_mpo(a, rank=9))
    value = from_library(mpo)
    assert (value.row_shape, value.col_shape) == ((2, 4), (3, 2))
    oracles.assert_close(value.full(), a.permute(0, 2, 1, 3).reshape(8, 6))
    data = [torch.from_numpy(oracles.normal((5, n))) for n in (2, 4)]
    together = np.einsum("bi,bj->bij", *(d.numpy() for d in data)).reshape(5, -1)
    oracles.assert_close(together @ value.full(), mpo(data).detach().numpy().reshape(5, -1))


def test_canonical_states_of_tensorkrowch() -> None:
    tk = library("tensorkrowch")
    _, from_library = verbs("tensorkrowch")
    mps = tk.models.MPS(n_features=4, phys_dim=3, bond_dim=3, init_method="randn", std=1.0, dtype=torch.float64)
    before = from_library(mps)
    assert before.center is None
    mps.canonicalize(oc=2)
    after = from_library(mps)
    assert after.center == 2
    assert tnlib.distance(after, before) <= 1e-13 * before.norm()


@pytest.mark.parametrize("model", ["MPS", "MPO"])
def test_trained_ends_of_tensorkrowch(model: str) -> None:
    """Training moves the vectors that close the chain, too."""
    tk = library("tensorkrowch")
    sizes = {"phys_dim": 2} if model == "MPS" else {"in_dim": 2, "out_dim": 3}
    obj = getattr(tk.models, model)(n_features=3, bond_dim=3, init_method="ones", **sizes)
    for k, node in enumerate((obj.left_node, obj.right_node, *obj.mats_env)):
        node.tensor.data = torch.from_numpy(oracles.normal(tuple(node.shape), seed=k))
    value = verbs("tensorkrowch")[1](obj)
    assert value.ranks == (1, 3, 3, 1)
    oracles.assert_close(value.full(), contracted(obj).reshape(value.shape))


@pytest.mark.parametrize("n", [1, 2])
def test_short_states_of_tensorkrowch(n: int) -> None:
    to_library, from_library = verbs("tensorkrowch")
    for value in (
        tnlib.TensorTrain(oracles.random_cores((3,) * n, (1, *[2] * (n - 1), 1))),
        tnlib.TTMatrix([c[:, :, None] for c in oracles.random_cores((3,) * n, (1, *[2] * (n - 1), 1))]),
    ):
        back = from_library(to_library(value))
        assert all(np.array_equal(a, b) for a, b in zip(back.cores, value.cores, strict=True))


def test_every_mixture_of_tntorch() -> None:
    tn = library("tntorch")
    _, from_library = verbs("tntorch")
    torch.manual_seed(0)
    x = torch.from_numpy(oracles.random_cp((4, 3, 5, 2), 2))
    for how in ({"ranks_tt": 2}, {"ranks_tucker": 2}, {"ranks_cp": 2}, {"ranks_tt": 3, "ranks_tucker": 2}, {}):
        obj = tn.Tensor(x, **how)
        oracles.assert_close(from_library(obj).full(), obj.torch().numpy())

    def rand(*shape: int) -> Any:
        return torch.from_numpy(oracles.normal(shape, seed=len(shape)))

    mixed: list[tuple[list[Any], list[Any]]] = [
        ([rand(1, 4, 2), rand(3, 2), rand(2, 5, 3), rand(2, 3)], [None] * 4),
        ([rand(4, 2), rand(2, 3, 2), rand(5, 2), rand(2, 2, 1)], [None, rand(6, 3), rand(7, 5), None]),
        ([rand(4, 2), rand(3, 2)], [rand(5, 4), rand(6, 3)]),
        ([rand(2, 4, 3), rand(3, 5, 2)], [None, None]),  # tntorch sums over open ends
        ([rand(2, 4, 3)], [None]),
    ]
    for cores, factors in mixed:
        obj = tn.Tensor(cores, Us=factors)
        oracles.assert_close(from_library(obj).full(), obj.torch().numpy())
    assert isinstance(from_library(tn.Tensor(mixed[2][0], Us=mixed[2][1])), tnlib.CP)
    matrix = torch.from_numpy(oracles.normal((6, 8)))
    for obj in (tn.TTMatrix(matrix, [4], [2, 3], [4, 2]), tn.CPMatrix(matrix, 3, [2, 3], [4, 2])):
        value = from_library(obj)
        assert (value.row_shape, value.col_shape) == ((2, 3), (4, 2))
        oracles.assert_close(value.full(), obj.torch().numpy())


def test_decompositions_of_torchtt() -> None:
    torchtt = library("torchtt")
    _, from_library = verbs("torchtt")
    x = oracles.random_train((4, 3, 5), (1, 2, 2, 1))
    value = from_library(torchtt.TT(torch.from_numpy(x), eps=1e-12))
    assert value.ranks == (1, 2, 2, 1)
    assert value.center == 2
    oracles.assert_close(value.full(), x, factor=1e5)
    a = oracles.normal((2, 3, 4, 2))
    operator = from_library(torchtt.TT(torch.from_numpy(a), [(2, 4), (3, 2)]))
    oracles.assert_close(operator.full(), a.reshape(6, 8))
    column = oracles.normal((4, 2))
    theirs = torchtt.TT(torch.from_numpy(a), [(2, 4), (3, 2)]) @ torchtt.TT(torch.from_numpy(column))
    oracles.assert_close(operator @ column.ravel(), theirs.full().numpy().ravel())


def test_trains_of_teneva() -> None:
    teneva = library("teneva")
    to_library, from_library = verbs("teneva")
    x = oracles.random_train((4, 3, 5), (1, 2, 2, 1))
    value = from_library(teneva.svd(x, 1e-12))
    oracles.assert_close(value.full(), x, factor=1e6)
    assert from_library(teneva.orthogonalize(to_library(value), 1)).center == 1
    with oracles.refused(TypeError, "from_teneva: ", "a list of cores and a power of two"):
        from_library(teneva.orthogonalize(to_library(value), 1, use_stab=True))


def test_decompositions_of_pyttb() -> None:
    ttb = library("pyttb")
    _, from_library = verbs("pyttb")
    x = oracles.random_cp((4, 3, 5), 2)
    np.random.seed(0)  # noqa: NPY002 - pyttb draws from the global generator
    cp = ttb.cp_als(ttb.tensor(x), 2, printitn=0)[0]
    for obj in (cp, ttb.hosvd(ttb.tensor(x), 1e-6, verbosity=0)):
        oracles.assert_close(from_library(obj).full(), obj.full().data)
        assert all(a.flags.c_contiguous for a in from_library(obj).arrays())


def test_sparse_parts_of_pyttb() -> None:
    ttb = library("pyttb")
    scipy = library("scipy.sparse")
    _, from_library = verbs("pyttb")
    core = ttb.sptensor(np.array([[0, 1], [1, 0]]), np.array([[2.0], [3.0]]), (2, 2))
    obj = ttb.ttensor(core, [scipy.coo_matrix(np.eye(3, 2)), np.eye(2)])
    oracles.assert_close(from_library(obj).full(), [[0, 2], [3, 0], [0, 0]])


def test_dense_tensors_of_pyttb_are_arrays_and_advice_for_sparse_ones_works() -> None:
    ttb, x = library("pyttb"), np.arange(24.0).reshape(2, 3, 4)
    back = verbs("pyttb")[1](ttb.tensor(x))
    assert np.array_equal(back, x)
    assert back.flags.c_contiguous
    sparse = ttb.sptensor(np.array([[0, 1, 2]]), np.array([[2.0]]), (2, 3, 4))
    for obj in (sparse, ttb.tensor(x)):
        with oracles.refused(TypeError, "cp: x must be", "pass .full().double() of it"):
            tnlib.cp(obj, 1)
        oracles.assert_close(tnlib.tt_svd(obj.full().double()).value.full(), obj.full().double())


# ------------------------------------------------------------------------------------------------- torch's own ways


def constructor(name: str) -> Any:
    wrap = {"tntorch": "Tensor", "torchtt": "TT"}.get(name)
    return getattr(library(name), wrap) if wrap else list


@pytest.mark.parametrize("name", ["tntorch", "torchtt", "tensorly"])
def test_gradients_stay_behind_and_half_precision_becomes_single(name: str) -> None:
    make, from_library = constructor(name), verbs(name)[1]
    cores = [torch.ones(1, 2, 2, requires_grad=True), torch.ones(2, 3, 1).conj()]
    assert from_library(make(cores)).full().sum() == 12
    for dtype in (torch.float16, torch.bfloat16):
        value = from_library(make([torch.full((1, 2, 1), 0.375, dtype=dtype)] * 2))
        assert value.dtype == np.float32
        assert (value.full() == 0.375**2).all()
    value = from_library(make([torch.ones(1, 2, 1, dtype=torch.complex64).mul(1j).conj()]))
    assert (value.full() == -1j).all()


@pytest.mark.parametrize("name", ["tntorch", "torchtt", "tensorly"])
def test_mixtures_that_are_refused(name: str) -> None:
    make, from_library = constructor(name), verbs(name)[1]
    one, double = torch.ones(1, 2, 1), torch.ones(1, 2, 1, dtype=torch.float64)
    with oracles.refused(TypeError, f"from_{name}: cores must have one precision", "float32 and float64"):
        from_library(make([one, double]))
    with oracles.refused(TypeError, f"from_{name}: cores must lie on one device", "cpu and meta"):
        from_library(make([one, one.to("meta")]))
    with oracles.refused(TypeError, f"from_{name}: core 0 must be a dense tensor with entries", "meta"):
        from_library(make([one.to("meta")]))
    with oracles.refused(ValueError, f"from_{name}: core 1 must be finite", "nan"):
        from_library(make([one, one * np.nan]))
    mixed = from_library(make([one, one * 1j]))
    assert mixed.dtype == np.complex64


def test_sparse_tensors_of_torch() -> None:
    with oracles.refused(TypeError, "from_tensorly: core 0 must be a dense tensor", "sparse_coo"):
        verbs("tensorly")[1]([torch.ones(1, 2, 1).to_sparse()])


# --------------------------------------------------------------------------------------------------------- refusals

EVERY = ["tensorly", "tensorkrowch", "tntorch", "torchtt", "teneva", "pyttb", "quimb"]
PACKAGES = {"torchtt": "torchTT"}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("obj", [None, 3, "train", {}, np.ones((2, 2))], ids=str)
def test_objects_of_another_kind(name: str, obj: Any) -> None:
    with oracles.refused(TypeError, f"from_{name}: obj must be ", type(obj).__name__):
        verbs(name)[1](obj)


@pytest.mark.parametrize("name", EVERY)
def test_values_of_another_kind(name: str) -> None:
    svd = tnlib.svd(np.ones((2, 3)))
    vidal = tnlib.vidal(tnlib.tt_svd(np.ones((2, 3))).value)
    for value, hint in (
        (svd.value, "tnlib.convert"),
        (svd, ".value"),
        (vidal, "value.train()"),
        (np.ones((2, 3)), "decompose"),
        (None, "decompose"),
    ):
        with oracles.refused(TypeError, f"to_{name}: value must be a", type(value).__name__, hint):
            verbs(name)[0](value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("teneva", tnlib.TTMatrix([np.ones((1, 2, 2, 1))])),
        ("teneva", tnlib.Tucker(np.ones((1, 1)), [np.ones((2, 1))] * 2)),
        ("torchtt", tnlib.CP(np.ones(1), [np.ones((2, 1))] * 2)),
        ("tensorkrowch", tnlib.Tucker(np.ones((1, 1)), [np.ones((2, 1))] * 2)),
        ("pyttb", tnlib.TensorTrain([np.ones((1, 2, 1))])),
        ("quimb", tnlib.CP(np.ones(1), [np.ones((2, 1))] * 2)),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_formats_that_a_library_does_not_have(name: str, value: Any) -> None:
    with oracles.refused(TypeError, f"to_{name}: value must be a", type(value).__name__, "tnlib.convert"):
        verbs(name)[0](value)


def test_other_refusals() -> None:
    tl, tk, tn = library("tensorly"), library("tensorkrowch"), library("tntorch")
    torchtt, ttb = library("torchtt"), library("pyttb")
    with oracles.refused(ValueError, "from_tensorly: ", "[2, 2]", "CPTensor"):
        verbs("tensorly")[1]([np.ones((2, 2)), np.ones((2, 2))])
    with oracles.refused(ValueError, "from_tensorly: ", "[]"):
        verbs("tensorly")[1]([])
    ring = tl.tr_tensor.TRTensor([np.ones((2, 3, 2)), np.ones((2, 3, 2))])
    with oracles.refused(TypeError, "from_tensorly: ", "tensorly.TRTensor"):
        verbs("tensorly")[1](ring)
    cyclic = tk.models.MPS(n_features=3, phys_dim=2, bond_dim=2, boundary="pbc")
    with oracles.refused(ValueError, "from_tensorkrowch: ", "open boundary", "'pbc'"):
        verbs("tensorkrowch")[1](cyclic)
    batch = tn.Tensor([torch.ones(5, 1, 2, 1), torch.ones(5, 1, 3, 1)], batch=True)
    with oracles.refused(ValueError, "from_tntorch: ", "a batch of 5"):
        verbs("tntorch")[1](batch)
    with oracles.refused(ValueError, "from_torchtt: ", "[]"):
        verbs("torchtt")[1](torchtt.TT(None))
    with oracles.refused(ValueError, "from_pyttb: "):
        verbs("pyttb")[1](ttb.ktensor())
    with oracles.refused(ValueError, "bond 1 must have one size"):
        verbs("teneva")[1]([np.ones((1, 2, 2)), np.ones((3, 2, 1))])


@pytest.mark.parametrize("name", [*EVERY[:4], "pyttb"])  # lists of teneva need no library
def test_a_library_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to_library, _ = verbs(name)
    monkeypatch.setitem(sys.modules, name, None)
    value: Any = tnlib.tt_svd(np.ones((2, 3))).value
    if name == "pyttb":
        value = tnlib.CP(np.ones(1), [np.ones((2, 1))] * 2)
    with pytest.raises(ModuleNotFoundError, match=f"to_{name} needs {PACKAGES.get(name, name)}, .*pip install"):
        to_library(value)


def test_nothing_is_imported_before_it_is_used() -> None:
    import subprocess

    code = "import sys\n" + "".join(f"import tnlib_adapters.interop.{name}\n" for name in [*EVERY, "itensor", "tenpy"])
    code += "print([m for m in ('torch', 'tensorly', 'tntorch', 'pyttb', 'h5py', 'quimb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
