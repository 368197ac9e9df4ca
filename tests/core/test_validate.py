"""Argument checks: what they convert, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib
from tnlib._validate import (
    as_array,
    as_count,
    as_dtype,
    as_flag,
    as_legs,
    as_position,
    as_rng,
    as_rtol,
    as_sizes,
    import_optional,
    is_list,
    is_one_of,
    plural,
    to_numpy,
)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_native_arrays_are_not_copied(dtype: np.dtype) -> None:
    a = oracles.normal((3, 4), dtype)
    for layout in (a, a.T, a[::-1, ::2]):
        assert as_array("f", "x", layout) is layout
    swapped = as_array("f", "x", a.astype(dtype.newbyteorder(">")))
    assert swapped.dtype == dtype
    np.testing.assert_array_equal(swapped, a)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [([1, 2], "float64"), ((True, False), "float64"), (np.ones(2, np.float16), "float32"), (np.arange(3), "float64")],
    ids=str,
)
def test_other_numbers_are_promoted(x: Any, dtype: str) -> None:
    assert as_array("f", "x", x).dtype == dtype


def test_torch_tensors_are_detached_and_converted() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1.5, -2.0]], requires_grad=True)
    for tensor, want in (
        (x, [[1.5, -2.0]]),
        (torch.nn.Parameter(x.detach()), [[1.5, -2.0]]),
        (x.bfloat16(), [[1.5, -2.0]]),
        (x.half(), [[1.5, -2.0]]),
        (x.detach().to(torch.complex64).mul(1j).conj(), [[-1.5j, 2.0j]]),
        (torch.arange(3), [0, 1, 2]),
    ):
        a = as_array("f", "x", tensor)
        np.testing.assert_array_equal(a, want)
        assert a.dtype in (np.float32, np.float64, np.complex64)
    assert x.requires_grad


def test_arrays_that_are_refused() -> None:
    for kind, x, words in (
        (TypeError, np.ma.masked_array([1.0], [True]), ("mask", "filled")),
        (TypeError, ["a"], ("dtype",)),
        (TypeError, np.ones(2, object), ("dtype object",)),
        (ValueError, 3.0, ("at least one leg",)),
        (ValueError, np.ones((2, 0)), ("size 0", "(2, 0)")),
        (ValueError, [[1.0], [np.nan]], ("finite", "index (1, 0)")),
        (ValueError, [1.0, np.inf], ("finite", "inf", "index (1,)")),
    ):
        with oracles.refused(kind, "f: x must", *words):
            as_array("f", "x", x)
    with oracles.refused(ValueError, "f: x must have 2 legs, got shape (2,)"):
        as_array("f", "x", [1.0, 2.0], ndim=2)

    class Sparse:
        def toarray(self) -> None: ...

    with oracles.refused(TypeError, "f: x must be dense", "toarray"):
        to_numpy("f", "x", Sparse())


def test_positions_count_from_both_ends() -> None:
    assert [as_position("f", "k", k, 3, "cores") for k in (0, 2, -1, -3, np.int32(-2))] == [0, 2, 2, 0, 1]
    for wrong in (3, -4, 17):
        with oracles.refused(ValueError, "f: k must lie between -3 and 2, one of 3 cores, got", str(wrong), "from 0"):
            as_position("f", "k", wrong, 3, "cores")
    for wrong in (1.0, "1", None, True):
        with oracles.refused(TypeError, "f: k must be an integer"):
            as_position("f", "k", wrong, 3, "cores")


def test_counts_sizes_and_legs() -> None:
    assert as_count("f", "n", np.int64(3)) == 3
    with oracles.refused(ValueError, "f: n must be at least 1, got 0"):
        as_count("f", "n", 0)
    with oracles.refused(TypeError, "f: n must be an integer, got True"):
        as_count("f", "n", True)
    assert as_sizes("f", "shape", np.array([2, 3]), total=6) == (2, 3)
    with oracles.refused(ValueError, "multiply to 7", "product 6"):
        as_sizes("f", "shape", (2, 3), total=7)
    with oracles.refused(TypeError, "sequence of leg sizes"):
        as_sizes("f", "shape", 6)
    assert as_legs("f", "legs", (0, -1), 3) == (0, 2)
    assert as_legs("f", "legs", 1, 3) == (1,)
    assert as_legs("f", "legs", (2, 0, 1), 3, proper=False) == (2, 0, 1)
    for wrong in ((0, 0), (0, 1, 2), ()):
        with oracles.refused(ValueError, "f: legs must name"):
            as_legs("f", "legs", wrong, 3)
    for wrong in ((3,), (-4,)):
        with oracles.refused(ValueError, "f: legs must lie between -3 and 2, got", str(wrong), "has 3 legs"):
            as_legs("f", "legs", wrong, 3)
    with oracles.refused(TypeError, "f: legs must be leg numbers"):
        as_legs("f", "legs", "ab", 3)


def test_tolerances_flags_and_seeds() -> None:
    assert as_rtol("f", None) is None
    assert as_rtol("f", np.float32(0.5)) == 0.5
    for wrong in (-0.1, 1.5, np.nan):
        with oracles.refused(ValueError, "f: rtol must lie between 0 and 1"):
            as_rtol("f", wrong)
    for wrong in ("0.1", True, 1j):
        with oracles.refused(TypeError, "f: rtol must be a real number"):
            as_rtol("f", wrong)
    assert [as_flag("f", "b", b) for b in (True, np.False_, 1, 0)] == [True, False, True, False]
    for wrong in (2, "yes", None, 1.0):
        with oracles.refused(TypeError, "f: b must be True or False"):
            as_flag("f", "b", wrong)
    rng = np.random.default_rng(3)
    assert as_rng("f", rng) is rng
    assert as_rng("f", None).random() == as_rng("f", 0).random()
    for wrong in (True, 0.5, "seed"):
        with oracles.refused(TypeError, "f: rng must be"):
            as_rng("f", wrong)


def test_dtypes() -> None:
    assert as_dtype("f", float) == np.float64
    assert as_dtype("f", ">c8") == np.complex64
    assert as_dtype("f", ">c8").isnative
    for wrong in (int, "float16", "no dtype", object):
        with oracles.refused(TypeError, "f: dtype must be one of float32"):
            as_dtype("f", wrong)


def test_predicates() -> None:
    assert all(map(is_list, ([], (1,), range(2), np.ones(2))))
    assert not any(map(is_list, ("ab", b"ab", 3, np.ones(()), {1}, None)))
    assert is_one_of("a", ("a", "b"))
    assert not any(is_one_of(value, ("a", "b")) for value in ("c", None, np.array(["a"]), ["a"]))
    assert (plural(1, "leg"), plural(3, "leg")) == ("one leg", "3 legs")


def test_optional_packages() -> None:
    assert import_optional("f", "math", "python").pi > 3
    with pytest.raises(ModuleNotFoundError, match="f needs package, found no no_such_module; pip install package"):
        import_optional("f", "no_such_module", "package")


X = oracles.normal((4, 4, 4))
TRAIN = tnlib.tt_svd(X).value
OPERATOR = tnlib.TTMatrix([np.ones((1, 4, 4, 1))] * 3)

CALLS: dict[str, Callable[..., Any]] = {
    "svd": lambda **k: tnlib.svd(X[0], **k),
    "tt_svd": lambda **k: tnlib.tt_svd(X, **k),
    "ttm_svd": lambda **k: tnlib.ttm_svd(X[0], (2, 2), (2, 2), **k),
    "tucker": lambda **k: tnlib.tucker(X, **k),
    "round": lambda **k: tnlib.round(TRAIN, **k),
    "apply": lambda **k: tnlib.apply(OPERATOR, TRAIN, **k),
    "truncate_bond": lambda **k: tnlib.truncate_bond(TRAIN, 1, **k),
    "round_randomized": lambda **k: tnlib.round_randomized(TRAIN, **k),
}


@pytest.mark.parametrize(
    ("theirs", "ours"), [("max_bond", "max_rank"), ("rank", "max_rank"), ("cutoff", "rtol"), ("eps", "rtol")]
)
@pytest.mark.parametrize("function", CALLS)
def test_keywords_of_other_libraries(function: str, theirs: str, ours: str) -> None:
    with oracles.refused(TypeError, function, f"{theirs}=", f"pass {ours}= instead"):
        CALLS[function](**{theirs: 3})


def test_keywords_of_functions_without_a_cap() -> None:
    with oracles.refused(TypeError, "cp", "pass rank= instead"):
        tnlib.cp(X, max_bond=3)
    with oracles.refused(TypeError, "tt_cross", "eps=", "pass rtol= instead"):
        tnlib.tt_cross(lambda points: points.sum(axis=1), (3, 3), eps=1e-3)
    with oracles.refused(TypeError, "tt_cross", "max_bond=", "leave it out"):
        tnlib.tt_cross(lambda points: points.sum(axis=1), (3, 3), rtol=1e-3, max_bond=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'"):
        tnlib.tt_svd(X, color=3)


USES: dict[str, Callable[[Any], object]] = {
    "round": tnlib.round,
    "vidal": tnlib.vidal,
    "entropy": lambda t: tnlib.entropy(t, 1),
    "inner": lambda t: tnlib.inner(TRAIN, t),
    "convert": lambda t: tnlib.convert(t, tnlib.Tucker),
    "entries": lambda t: tnlib.entries(t, [[0, 0, 0]]),
    "tt_svd": tnlib.tt_svd,
    "kron": lambda t: tnlib.kron(t, TRAIN),
    "balance": tnlib.balance,
    "save": lambda t: tnlib.save("never-written.safetensors", t),
    "TensorTrain": tnlib.TensorTrain,
    "TensorTrain +": lambda t: TRAIN + t,
    "TensorTrain *": lambda t: TRAIN * t,
}


@pytest.mark.parametrize("function", USES)
def test_a_fit_in_the_place_of_its_value(function: str) -> None:
    with oracles.refused(TypeError, function, "Fit", "pass fit.value"):
        USES[function](tnlib.tt_svd(X))


def _quimb() -> Any:
    return pytest.importorskip("quimb.tensor").MPS_rand_state(3, 2)


def _tenpy() -> Any:
    site = pytest.importorskip("tenpy.networks.site").SpinHalfSite(conserve=None)
    mps = pytest.importorskip("tenpy.networks.mps").MPS
    return mps.from_product_state([site] * 3, ["up"] * 3, unit_cell_width=3)


def _torchtt() -> Any:
    return pytest.importorskip("torchtt").TT(pytest.importorskip("torch").ones(4, 4, 4))


@pytest.mark.parametrize("function", USES)
@pytest.mark.parametrize("make", [_quimb, _tenpy, _torchtt])
def test_trains_of_other_libraries(make: Callable[[], Any], function: str) -> None:
    name = make.__name__[1:]
    with oracles.refused(TypeError, function, f"tnlib_adapters.interop.{name}.from_{name}"):
        USES[function](make())


def test_torch_tensors_with_a_gradient_or_in_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X).bfloat16().requires_grad_()
    want = x.detach().float().numpy()
    fit = tnlib.tt_svd(x)
    assert fit.value.dtype == np.float32
    oracles.assert_close(fit.value.full(), want, np.float32)
    product = tnlib.TensorTrain([x[:1], x[:, :, :1]]).full()
    assert product.requires_grad
    oracles.assert_close(product.detach(), want[0] @ want[:, :, 0], np.float32)
    cross = tnlib.tt_cross(lambda points: x[tuple(torch.from_numpy(points).T)], x.shape, rtol=1e-5)
    oracles.assert_close(cross.value.full(), want, np.float32)


def test_arguments_that_are_empty_or_exchanged() -> None:
    with oracles.refused(TypeError, "TensorTrain", "an empty list", "pass at least one"):
        tnlib.TensorTrain([])
    with oracles.refused(TypeError, "apply", "operator", "exchange them"):
        tnlib.apply(TRAIN, OPERATOR)  # type: ignore[arg-type]


@pytest.mark.parametrize("rtol", [10**400, -(10**400), 1e400])
def test_tolerances_beyond_every_float(rtol: float) -> None:
    with oracles.refused(ValueError, "rtol must lie between 0 and 1", "inf"):
        tnlib.tt_svd(X, rtol=rtol)


@pytest.mark.parametrize("scale", [1e30, -1e30, 10**400])
def test_scales_beyond_their_limit(scale: float) -> None:
    form = tnlib.vidal(TRAIN)
    for make in (
        lambda: tnlib.TensorTrain(TRAIN.cores, log_scale=scale),
        lambda: tnlib.TensorTrain(TRAIN.cores, exponent=int(scale)),
        lambda: tnlib.Vidal(form.gammas, form.lambdas, scale),
    ):
        with oracles.refused(ValueError, "must lie between -1e12 and 1e12"):
            make()


def test_a_scale_beyond_the_dtype_is_refused_where_entries_are_formed() -> None:
    train = tnlib.TensorTrain(TRAIN.cores, log_scale=1e10)
    assert train.log_norm() == pytest.approx(1e10)
    for form in (train.full, train.norm, lambda: tnlib.vidal(train).full(), lambda: train[0, 0, 0]):
        with oracles.refused(ValueError, "1.8e308" if form == train.norm else "range of float64"):
            form()
