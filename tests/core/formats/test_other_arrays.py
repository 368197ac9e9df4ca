"""Arrays of other libraries: the contract, gradients, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import other_arrays
import pytest
from other_arrays import MAKERS
from slow_cases import mostly_slow

import tnlib

kinds = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
dtypes = oracles.each_dtype
SHAPE = (4, 5, 6, 4)


def noisy(dtype: Any = np.float64, noise: float = 1e-3, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """A train of ranks 3 and norm 1 plus normally distributed noise."""
    x = oracles.random_train(shape, [1, *[3] * (len(shape) - 1), 1], dtype, 0)
    x = x / oracles.norm(x)
    return (x + noise * oracles.normal(shape, dtype, 1) / np.sqrt(x.size)).astype(dtype)


def check(fit: Any, x: np.ndarray, like: Any, rtol: float | None) -> None:
    """Hold the contract, on the reconstruction, and the kind of the arrays."""
    assert all(other_arrays.kind_of(a) == other_arrays.kind_of(like) for a in fit.value.arrays())
    assert other_arrays.kind_of(fit.value.full()) == other_arrays.kind_of(like)
    value = fit.value.to_numpy()
    oracles.assert_close(np.asarray(fit.value.to_numpy().full()), oracles.contract(value), value.dtype, 2000)
    host = tnlib.Fit(value, fit.error, fit.certified, fit.converged, fit.n_iter)
    oracles.assert_fit(host, x, rtol=rtol)
    oracles.assert_gauge(value)
    assert fit.value.dtype == x.dtype
    assert type(fit.value) is type(value)


@kinds
@dtypes
@pytest.mark.parametrize("name", oracles.METHODS)
def test_the_contract_of_decompositions(name: str, dtype: np.dtype, make: Callable[[Any], Any]) -> None:
    x = noisy(dtype).reshape(20, 24) if name == "ttm_svd" else noisy(dtype)
    for rtol, cap in ((None, None), (1e-2, None), (None, 2), (0.0, None)):
        fit, warned = oracles.quietly(lambda r=rtol, c=cap: oracles.METHODS[name](make(x), r, c))
        check(fit, x, make(x), rtol)
        oracles.assert_warned(fit, warned)


@kinds
@pytest.mark.parametrize("scale", [1e-200, 1e200])
@pytest.mark.parametrize("name", oracles.METHODS)
def test_scales(name: str, scale: float, make: Callable[[Any], Any]) -> None:
    x = noisy().reshape(20, 24) if name == "ttm_svd" else noisy()
    plain, scaled = (oracles.METHODS[name](make(c * x), 1e-2) for c in (1.0, scale))
    assert plain.value.ranks == scaled.value.ranks
    check(scaled, scale * x, make(x), 1e-2)
    rounded = tnlib.round(scaled.value, rtol=0.1)
    assert rounded.value.ranks == tnlib.round(plain.value, rtol=0.1).value.ranks
    difference = np.asarray(rounded.value.to_numpy().full()) / scale - scaled.value.to_numpy().full() / scale
    assert oracles.norm(difference) <= 0.1 * oracles.norm(x)


def formats(dtype: Any = np.float64) -> dict[str, tnlib.Format]:
    return {
        "TensorTrain": tnlib.random.tensor_train(SHAPE, 3, dtype=dtype, rng=1),
        "TTMatrix": tnlib.random.tt_matrix((3, 4, 2), (2, 3, 4), 3, dtype=dtype, rng=2),
        "Tucker": tnlib.random.tucker(SHAPE, 3, dtype=dtype, rng=3),
        "SVD": tnlib.svd(oracles.normal((6, 7), dtype, 4)).value,
    }


def moved(value: Any, make: Callable[[Any], Any]) -> Any:
    """The same format with arrays of another library, through its constructor."""
    match value:
        case tnlib.SVD():
            return tnlib.SVD(make(value.u), make(value.s), make(value.vh), value.left)
        case tnlib.Tucker():
            return tnlib.Tucker(make(value.core), [make(a) for a in value.factors])
        case _:
            return type(value)([make(core) for core in value.cores], value.center, exponent=value.exponent)


@kinds
@dtypes
@pytest.mark.parametrize("name", ["TensorTrain", "TTMatrix", "Tucker", "SVD"])
def test_full_and_round(name: str, dtype: np.dtype, make: Callable[[Any], Any]) -> None:
    value = formats(dtype)[name]
    other = moved(value, make)
    assert isinstance(other, getattr(tnlib, name))
    assert (other.shape, other.ranks, other.n_parameters) == (value.shape, value.ranks, value.n_parameters)
    oracles.assert_close(np.asarray(other.to_numpy().full()), value.full(), dtype)
    for options in ({}, {"rtol": 0.3}, {"max_rank": 2}):
        fit, _ = oracles.quietly(lambda options=options: tnlib.round(other, **options))
        check(fit, value.full(), make(value.full()), options.get("rtol"))
        assert fit.value.ranks == oracles.quietly(lambda options=options: tnlib.round(value, **options))[0].value.ranks


@kinds
@dtypes
def test_inner(dtype: np.dtype, make: Callable[[Any], Any]) -> None:
    for name in ("TensorTrain", "TTMatrix", "Tucker"):
        a = formats(dtype)[name]
        b = tnlib.round(a, max_rank=2).value
        got, want = tnlib.inner(moved(a, make), moved(b, make)), np.vdot(a.full(), b.full())
        assert other_arrays.kind_of(got) == other_arrays.kind_of(make(np.ones(1)))
        assert abs(complex(got) - want) <= 100 * oracles.eps(dtype) * a.norm() * b.norm()


@kinds
@dtypes
def test_apply_and_canonicalize(dtype: np.dtype, make: Callable[[Any], Any]) -> None:
    operator = formats(dtype)["TTMatrix"]
    train = tnlib.random.tensor_train(operator.col_shape, 2, dtype=dtype, rng=5)  # type: ignore[attr-defined]
    for right in (train, operator.T):  # type: ignore[attr-defined]
        product = (operator @ right).full()
        for rtol in (None, 0.2):
            fit = tnlib.apply(moved(operator, make), moved(right, make), rtol=rtol)
            check(fit, product, make(product), rtol)
    for center in (0, 1, -1):
        value = tnlib.canonicalize(moved(operator, make), center)
        assert max(tnlib.isometry_errors(value.to_numpy())) <= 100 * oracles.eps(dtype)
        oracles.assert_close(value.to_numpy().full(), operator.full(), dtype)


@kinds
@dtypes
@pytest.mark.parametrize("name", ["TensorTrain", "TTMatrix"])
def test_sums_multiples_norms_and_entries(name: str, dtype: np.dtype, make: Callable[[Any], Any]) -> None:
    a = formats(dtype)[name]
    b = tnlib.round(a, max_rank=2).value
    other, second = moved(a, make), moved(b, make)
    factor = 2 - 1j if dtype.kind == "c" else -2.5
    for got, want in (
        (other + second, a.full() + b.full()),
        (other - 3 * second, a.full() - 3 * b.full()),
        (sum([other, second]), a.full() + b.full()),
        (factor * -other / 1e30, -factor / 1e30 * a.full()),
        (other * 1e-30, 1e-30 * a.full()),
    ):
        assert type(got) is type(other)
        assert got.dtype == dtype
        assert other_arrays.kind_of(got.cores[0]) == other_arrays.kind_of(make(np.ones(1)))
        oracles.assert_close(np.asarray(got.to_numpy().full()), want.astype(dtype), dtype)
    assert other_arrays.kind_of(other.norm()) == other_arrays.kind_of(make(np.ones(1)))
    assert float(other.norm()) == pytest.approx(a.norm(), rel=100 * oracles.eps(dtype))
    indices = np.array([[0, 1, 1], [1, 0, -1]])
    indices = np.stack([indices] * 2, axis=-1) if name == "TTMatrix" else np.pad(indices, ((0, 0), (0, 1)))
    got = tnlib.entries(other, indices[None])
    assert other_arrays.kind_of(got) == other_arrays.kind_of(make(np.ones(1)))
    assert tuple(got.shape) == (1, 2)
    got = np.asarray(tnlib.TensorTrain([got[:, :, None]]).to_numpy().full())
    oracles.assert_close(got, tnlib.entries(a, indices), dtype, 100)
    assert tnlib.entries(other, indices[:0]).shape[0] == 0


@kinds
def test_entries_and_norms_beyond_the_range_of_products(make: Callable[[Any], Any]) -> None:
    """A thousand cores whose products overflow, or underflow, before the others bring them back."""
    cores = [np.full((1, 2, 1), 1e-3)] * 500 + [np.full((1, 2, 1), 1e3)] * 500
    other = tnlib.TensorTrain([make(core) for core in cores])
    assert float(tnlib.entries(other, np.zeros((1, 1000), int))[0]) == pytest.approx(1)
    assert float((other / 2.0**500).norm()) == pytest.approx(1)
    with oracles.refused(ValueError, "TensorTrain.norm", "range of float64", "log_scale"):
        (other * 1e200).norm()


@pytest.mark.slow
@kinds
def test_hundreds_of_cores(make: Callable[[Any], Any]) -> None:
    core = oracles.normal((2, 3, 2)) * 1e3
    cores = [core[:1], *[core] * 150, core[:, :, :1]]
    other, plain = tnlib.TensorTrain([make(c) for c in cores]), tnlib.TensorTrain(cores)
    rounded = tnlib.round(other, rtol=1e-10)
    assert rounded.value.to_numpy().log_norm() == pytest.approx(plain.log_norm(), rel=1e-12)
    with oracles.refused(ValueError, "inner", "lower the log_scale"):
        tnlib.inner(other, other)


# ---------------------------------------------------------------------------------------------------- gradients


def differentiable(name: str, dtype: Any) -> tuple[list[Any], Callable[..., Any]]:
    """Leaves of a small format, and its constructor."""
    torch = pytest.importorskip("torch")
    value = moved(formats(dtype)[name], other_arrays.to_torch)
    leaves = [torch.tensor(a.numpy(), requires_grad=True) for a in value.arrays()]
    if name == "Tucker":
        return leaves, lambda *a: tnlib.Tucker(a[0], a[1:])
    return leaves, {"SVD": tnlib.SVD}.get(name, lambda *a: getattr(tnlib, name)(a))


@pytest.mark.parametrize("dtype", mostly_slow([np.float64, np.complex128], [np.float64]), ids=["real", "complex"])
@pytest.mark.parametrize("name", ["TensorTrain", "TTMatrix", "Tucker", "SVD"])
def test_gradients(name: str, dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    leaves, build = differentiable(name, dtype)
    fixed = moved(tnlib.round(formats(dtype)[name], max_rank=2).value, other_arrays.to_torch)
    calls: dict[str, Callable[..., Any]] = {
        "full": lambda *a: build(*a).full(),
        "round": lambda *a: tnlib.round(build(*a), max_rank=2).value.full(),
        "inner": lambda *a: tnlib.inner(fixed, build(*a)),
        "apply": lambda *a: tnlib.apply(
            build(*a), moved(fixed.to_numpy().T, other_arrays.to_torch), max_rank=3
        ).value.full(),
        "canonicalize": lambda *a: tnlib.canonicalize(build(*a), 1).full(),
        "sum": lambda *a: (2 * build(*a) - fixed).full(),
        "norm": lambda *a: (build(*a) + build(*a)).norm(),
        "entries": lambda *a: tnlib.entries(build(*a), [[0, 1, 2, 3], [3, 2, 1, 0]]),
    }
    chosen = {"TensorTrain": set(calls) - {"apply"}, "TTMatrix": set(calls) - {"entries"}}
    for call in chosen.get(name, {"full", "round", "inner"} - ({"inner", "round"} if name == "SVD" else set())):
        assert torch.autograd.gradcheck(calls[call], leaves, fast_mode=True), call


def test_a_loss_of_a_train_decreases() -> None:
    """One step of gradient descent on norm(round(t).full() - target)^2."""
    torch = pytest.importorskip("torch")
    leaves, build = differentiable("TensorTrain", np.float64)
    target = torch.tensor(formats()["TensorTrain"].full()) * 0.9

    def loss(cores: Any) -> Any:
        return (tnlib.round(build(*cores), max_rank=3).value.full() - target).square().sum()

    before = loss(leaves)
    before.backward()
    after = loss([leaf.detach() - 1e-4 * leaf.grad for leaf in leaves])
    assert after < before


def test_bonds_larger_than_the_ranks_have_no_gradient() -> None:
    torch = pytest.importorskip("torch")
    train = formats()["TensorTrain"]
    cores = [torch.tensor(core, requires_grad=True) for core in (train + train).cores]  # type: ignore[operator]
    with oracles.refused(ValueError, "round", "torch.no_grad()"):
        tnlib.round(tnlib.TensorTrain(cores))
    with torch.no_grad():
        assert tnlib.round(tnlib.TensorTrain(cores)).value.ranks == train.ranks


@pytest.mark.parametrize("diagonal", [[1.0, 1.0, 0.5], [1.0, 0.5, 0.0]], ids=["equal", "zero"])
def test_equal_singular_values_have_no_gradient(diagonal: list[float]) -> None:
    torch = pytest.importorskip("torch")
    right = torch.eye(3, dtype=torch.float64)[:, :, None].requires_grad_()
    left = torch.diag(torch.tensor(diagonal, dtype=torch.float64))[None].requires_grad_()
    with oracles.refused(ValueError, "round", "distinct", "torch.no_grad()"):
        tnlib.round(tnlib.TensorTrain([left, right]), max_rank=2)
    factors = [torch.eye(3, dtype=torch.float64, requires_grad=True)] * 2
    with oracles.refused(ValueError, "round", "distinct"):
        tnlib.round(tnlib.Tucker(left[0], factors), max_rank=2)


def test_decompositions_detach() -> None:
    torch = pytest.importorskip("torch")
    fit = tnlib.tt_svd(torch.tensor(noisy(), requires_grad=True), rtol=1e-2)
    assert not any(core.requires_grad for core in fit.value.cores)


# ---------------------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, Callable[[Any], Any]] = {
    "mul": lambda t: t * t,
    "add numpy": lambda t: t + t.to_numpy(),
    "numpy minus": lambda t: t.to_numpy() - t,
    "getitem": lambda t: t[0],
    "T": lambda t: t.T,
    "conj": lambda t: t.conj(),
    "real": lambda t: t.real,
    "astype": lambda t: t.astype(np.float32),
    "log_norm": lambda t: t.log_norm(),
    "vidal": tnlib.vidal,
    "schmidt_values": lambda t: tnlib.schmidt_values(t, 1),
    "entropy": lambda t: tnlib.entropy(t, 1),
    "convert": lambda t: tnlib.convert(t, tnlib.Tucker),
    "convert rows": lambda t: tnlib.convert(t, tnlib.TTMatrix, row_shape=(2, 1, 2, 2)),
    "save": lambda t: tnlib.save("train.safetensors", t),
    "draw": tnlib.draw,
    "kron": lambda t: tnlib.kron(t, t),
    "outer": lambda t: tnlib.outer(t, t),
    "contract": lambda t: tnlib.contract(t, {0: np.ones(4)}),
    "sum_legs": tnlib.sum_legs,
    "distance": lambda t: tnlib.distance(t, t),
    "canonical_form": tnlib.canonical_form,
    "degenerate_groups": tnlib.degenerate_groups,
    "round_randomized": lambda t: tnlib.round_randomized(t, max_rank=2),
    "truncate_bond": lambda t: tnlib.truncate_bond(t, 1, max_rank=1),
    "isometry_errors": tnlib.isometry_errors,
    "concatenate": lambda t: tnlib.concatenate([t, t]),
    "inner with numpy": lambda t: tnlib.inner(t, t.to_numpy()),
    "inner of numpy": lambda t: tnlib.inner(t.to_numpy(), t),
    "inner with an operator": lambda t: tnlib.inner(t, t, tnlib.eye(SHAPE)),
    "apply to numpy": lambda t: tnlib.apply(tnlib.TTMatrix([a[:, :, None, :] for a in t.cores]), tnlib.ones((1,) * 4)),
    "apply of numpy": lambda t: tnlib.apply(tnlib.eye(SHAPE), t),
}


@kinds
def test_other_functions_refuse(make: Callable[[Any], Any]) -> None:
    value = moved(formats()["TensorTrain"], make)
    for name, call in REFUSED.items():
        with pytest.raises(tnlib.ArgumentTypeError, match="numpy arrays") as caught:
            call(value)
        assert "to_numpy()" in str(caught.value), name
        assert str(caught.value).count(". ") == 0, "one sentence"


@kinds
def test_constructors_refuse(make: Callable[[Any], Any]) -> None:
    core = oracles.normal((1, 3, 1))
    with oracles.refused(TypeError, "TensorTrain", "one library"):
        tnlib.TensorTrain([make(core), core])
    with oracles.refused(ValueError, "TensorTrain", "finite"):
        tnlib.TensorTrain([make(np.full((1, 2, 1), np.nan))])
    with oracles.refused(ValueError, "TensorTrain", "bond 1"):
        tnlib.TensorTrain([make(np.ones((1, 2, 2))), make(np.ones((3, 2, 1)))])
    with oracles.refused(ValueError, "Tucker", "2 columns"):
        tnlib.Tucker(make(np.ones((2, 2))), [make(np.ones((3, 2))), make(np.ones((3, 1)))])
    with oracles.refused(ValueError, "SVD", "share r"):
        tnlib.SVD(make(np.ones((3, 2))), make(np.ones(1)), make(np.ones((2, 3))))
    with oracles.refused(ValueError, "tt_svd", "finite"):
        tnlib.tt_svd(make(np.array([1.0, np.inf])))


@kinds
def test_reports_and_errors_name_the_public_class(make: Callable[[Any], Any]) -> None:
    assert repr(tnlib.tt_svd(make(noisy()), max_rank=2)).startswith("Fit of TensorTrain,")
    with oracles.refused(ValueError, "TensorTrain.full", "64 legs"):
        tnlib.TensorTrain([make(np.ones((1, 2, 1)))] * 65).full()


@pytest.mark.parametrize("name", ["TensorTrain", "TTMatrix", "Tucker"])
def test_operands_of_two_libraries(name: str) -> None:
    pytest.importorskip("torch")
    value = formats()[name]
    with oracles.refused(TypeError, "inner", "one library", "torch", "array_api_strict"):
        tnlib.inner(*(moved(value, make) for make in (other_arrays.to_torch, other_arrays.to_strict)))


def test_tensors_without_entries() -> None:
    torch = pytest.importorskip("torch")
    with oracles.refused(TypeError, "tt_svd", "x must be a dense tensor with entries", "meta"):
        tnlib.tt_svd(torch.ones(2, 3, device="meta"))
    with oracles.refused(TypeError, "TensorTrain", "core 0", "sparse"):
        tnlib.TensorTrain([torch.ones(1, 2, 1).to_sparse()])


def test_subclasses_of_tensors() -> None:
    torch = pytest.importorskip("torch")

    class Weights(torch.Tensor):  # type: ignore[misc]
        pass

    core = torch.ones(1, 2, 1)
    assert tnlib.TensorTrain([core, core.as_subclass(Weights)]).shape == (2, 2)


@pytest.mark.parametrize("name", ["TensorTrain", "TTMatrix", "Tucker", "SVD"])
def test_arrays_are_stored_without_a_copy(name: str) -> None:
    value = moved(formats()[name], other_arrays.to_torch)
    again = type(value).from_named_arrays(value.named_arrays(), value.attributes())
    assert all(a is b for a, b in zip(value.arrays(), again.arrays(), strict=True))
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        oracles.assert_close(other.to_numpy().full(), value.to_numpy().full(), value.dtype)


@kinds
def test_cp_and_tree_copy_the_array_to_the_host(make: Callable[[Any], Any]) -> None:
    """Formats of numpy arrays, equal to those of the numpy array."""
    quimb = pytest.importorskip("tnlib.interop.quimb")
    x = np.add.outer(np.add.outer(np.arange(4.0), np.arange(5.0)), np.arange(6.0) ** 2)
    for decompose in (lambda a: tnlib.cp(a, 3, rtol=1e-2), lambda a: quimb.tree(a, rtol=1e-2)):
        fit, expected = decompose(make(x)), decompose(x)
        assert fit.error == expected.error
        assert isinstance(fit.value.full(), np.ndarray)
        np.testing.assert_array_equal(fit.value.full(), expected.value.full())


def test_integers_and_half_precision() -> None:
    torch = pytest.importorskip("torch")
    assert tnlib.tt_svd(torch.arange(8).reshape(2, 4)).value.cores[0].dtype == torch.float64
    train = tnlib.TensorTrain([torch.ones(1, 2, 1, dtype=torch.bfloat16)])
    assert train.cores[0].dtype == torch.float32
