"""Argument checks of public functions: arrays, keywords and objects of other libraries, and optional packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib
from tnlib._validate import import_optional


def test_arrays_that_are_refused() -> None:
    class Sparse:
        def toarray(self) -> None: ...

    for x, word in ((np.ma.masked_array([1.0], [True]), "filled"), (Sparse(), "toarray")):
        with oracles.refused(TypeError, "tt_svd: x must", word):
            tnlib.tt_svd(x)
    with oracles.refused(ValueError, "tt_svd: x must", "at least one leg"):
        tnlib.tt_svd(3.0)


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
    with oracles.refused(TypeError, "tt_cross", "max_bond=", "pass max_rank= instead"):
        tnlib.tt_cross(lambda points: points.sum(axis=1), (3, 3), rtol=1e-3, max_bond=3)
    with oracles.refused(TypeError, "tt_svd", "memory=", "pass storage= instead, tnlib.Storage(memory=...)"):
        tnlib.tt_svd(X, memory=2**20)
    with oracles.refused(TypeError, "round: too many arguments without a name", "pass rtol= by name"):
        tnlib.round(TRAIN, 1e-3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'"):
        tnlib.tt_svd(X, color=3)


def test_text_and_masks_are_refused_with_the_remedy() -> None:
    with oracles.refused(TypeError, "tt_svd: x must be numeric, got <U8 'big.zarr'", "open the file"):
        tnlib.tt_svd("big.zarr")
    with oracles.refused(TypeError, "expectation: operator", "'Sz'", "pass the matrix"):
        tnlib.expectation(TRAIN, "Sz", 0)
    with oracles.refused(TypeError, "product_state: vectors[0]", "'up'", "vector"):
        tnlib.product_state(["up", "down"])
    with oracles.refused(TypeError, "tt_svd", "without a mask", "or use tnlib.tucker or cp"):
        tnlib.tt_svd(np.ma.masked_invalid(X))
    with oracles.refused(TypeError, "round: t must be", "a list", "tnlib.round_randomized(t)"):
        tnlib.round([TRAIN, TRAIN])


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


@pytest.mark.parametrize("function", ["entropy", "expectation", "inner", "round"])
def test_a_vidal_form_in_the_place_of_its_train(function: str) -> None:
    uses = {
        "entropy": lambda t: tnlib.entropy(t, 1),
        "expectation": lambda t: tnlib.expectation(t, np.eye(2), 0),
        "inner": lambda t: tnlib.inner(t, t),
        "round": tnlib.round,
    }
    form = tnlib.vidal(tnlib.ones((2, 2)))
    with oracles.refused(TypeError, function, "Vidal", "pass its train()"):
        uses[function](form)
    uses[function](form.train())


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
