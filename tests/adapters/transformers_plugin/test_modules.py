"""Linear layers of torch that hold factors: the same function, the same gradients, no dense weight where it costs."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from oracles import assert_close, contract, normal, refused, unchanged

torch = pytest.importorskip("torch")
pytest.importorskip("tnlib_adapters.transformers_plugin")

from tnlib_adapters.transformers_plugin import ContractedLinear, FactoredLinear  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import tnlib  # noqa: E402
from tnlib import CP, SVD, LowRank, TTMatrix, Tucker  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A value, the legs it reads, and what becomes of it."""

    make: Callable[[Any], Any]  # dtype -> value
    inputs: tuple[int, ...] | None = None

    def value(self, dtype: Any = np.float64) -> Any:
        return self.make(dtype)

    def matrix(self, dtype: Any = np.float64) -> np.ndarray:
        """(in, out), multiplied out from the definition of the format."""
        full = contract(self.value(dtype))
        read = (0,) if self.inputs is None else self.inputs
        written = [leg for leg in range(full.ndim) if leg not in read]
        return full.transpose(*read, *written).reshape(math.prod(full.shape[leg] for leg in read), -1)

    def layer(self, of: Any = np.float64, bias: bool = True, **options: Any) -> Any:
        b = normal(self.matrix().shape[1], of, seed=9) if bias else None
        return FactoredLinear.from_value(self.value(of), inputs=self.inputs, bias=b, **options)


def arrays(dtype: Any, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [normal(shape, dtype, seed=k) for k, shape in enumerate(shapes)]


def svd(dtype: Any) -> SVD:
    return tnlib.svd(normal((12, 10), dtype, seed=1), max_rank=3).value


def tucker(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Callable[[Any], Tucker]:
    def make(dtype: Any) -> Tucker:
        core, *factors = arrays(dtype, ranks, *zip(shape, ranks, strict=True))
        return Tucker(core, factors)

    return make


def cp(shape: tuple[int, ...], rank: int) -> Callable[[Any], CP]:
    def make(dtype: Any) -> CP:
        weights, *factors = arrays(dtype, (rank,), *((n, rank) for n in shape))
        return CP(np.abs(weights), factors)

    return make


STACK = (4, 3, 12, 5)  # projections, heads, features, features of a head
CASES = {
    "low rank": Case(lambda t: LowRank(*arrays(t, (12, 3), (3, 10)))),
    "svd": Case(svd),
    "tt": Case(lambda t: TTMatrix(arrays(t, (1, 3, 2, 2), (2, 4, 5, 1)))),
    "tt of one core": Case(lambda t: TTMatrix(arrays(t, (1, 12, 10, 1)))),
    "tt of three cores, scaled": Case(
        lambda t: TTMatrix(arrays(t, (1, 3, 2, 3), (3, 2, 1, 2), (2, 2, 5, 1)), log_scale=-2.5)
    ),
    "tucker of a matrix": Case(tucker((12, 10), (3, 2))),
    "tucker, one leg read": Case(tucker(STACK, (2, 3, 4, 2)), (2,)),
    "tucker, legs apart read": Case(tucker(STACK, (4, 2, 4, 3)), (1, 3)),
    "tucker, legs read in another order": Case(tucker(STACK, (2, 2, 2, 2)), (3, 0)),
    "cp of a matrix": Case(cp((12, 10), 3)),
    "cp, one leg read": Case(cp(STACK, 4), (2,)),
    "cp, legs apart read": Case(cp(STACK, 30), (1, 3)),
    "cp, last leg read": Case(cp((3, 4, 5), 2), (2,)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
ONE_OF_EACH = [CASES[name] for name in ("low rank", "tt", "tucker, one leg read", "cp, one leg read")]
one_of_each = pytest.mark.parametrize("case", ONE_OF_EACH, ids=["low rank", "tt", "tucker", "cp"])


def rows_of(case: Case, *shape: int, dtype: Any = np.float64) -> Any:
    return torch.from_numpy(normal((*shape, case.matrix().shape[0]), dtype, seed=5))


# ------------------------------------------------------------------------------------------------------- the function


@each_case
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (40,)])
def test_rows_times_the_matrix(case: Case, bias: bool, shape: tuple[int, ...]) -> None:
    layer, x, w = case.layer(bias=bias), rows_of(case, *shape), case.matrix()
    assert type(layer) is ContractedLinear
    assert (layer.in_features, layer.out_features) == w.shape
    want = x.numpy() @ w + (normal(w.shape[1], seed=9) if bias else 0)
    assert_close(layer(x).detach().numpy(), want)


@each_case
def test_no_rows_at_all(case: Case) -> None:
    layer = case.layer()
    assert layer(torch.zeros(2, 0, layer.in_features, dtype=torch.float64)).shape == (2, 0, layer.out_features)


@each_case
def test_through_the_factors_and_multiplied_out(case: Case) -> None:
    """Whichever of the two ways `forward` takes."""
    layer, x, w = case.layer(bias=False), rows_of(case, 2, 3), case.matrix()
    assert_close(layer.product(x).detach().numpy(), x.numpy() @ w)
    assert_close(layer.matrix().detach().numpy(), w)


@each_case
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.complex128])
def test_dtypes(case: Case, dtype: Any) -> None:
    layer, x, w = case.layer(dtype), rows_of(case, 4, dtype=dtype), case.matrix(dtype)
    found = layer(x).detach().numpy()
    assert found.dtype == dtype
    assert_close(found, x.numpy() @ w + normal(w.shape[1], dtype, seed=9), dtype)


@each_case
@pytest.mark.parametrize(("dtype", "step"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_precision(case: Case, dtype: str, step: float) -> None:
    low = case.layer(np.float32, dtype=getattr(torch, dtype))
    same = copy.deepcopy(low).double()
    x = rows_of(case, 6).to(getattr(torch, dtype))
    got, want = low(x), same(x.double()).detach().numpy()
    assert {p.dtype for p in low.parameters()} == {got.dtype} == {getattr(torch, dtype)}
    size = np.abs(want).max()
    assert np.abs(got.detach().double().numpy() - want).max() <= 40 * step * size


@one_of_each
def test_under_autocast(case: Case) -> None:
    layer, x = case.layer(np.float32), rows_of(case, 6, dtype=np.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
    want = layer(x).detach().numpy()
    assert np.abs(got.detach().float().numpy() - want).max() <= 40 * 2.0**-8 * np.abs(want).max()


def test_on_another_device() -> None:
    """The meta device stands for all: whatever forgets to move is found."""
    for case in CASES.values():
        layer = case.layer().to("meta")
        assert layer(torch.zeros(3, layer.in_features, device="meta", dtype=torch.float64)).device.type == "meta"
        built = case.layer(device="meta", dtype=torch.float32)
        assert {(p.device.type, p.dtype) for p in built.parameters()} == {("meta", torch.float32)}


# ----------------------------------------------------------------------------------------------------------- its price


class Largest(TorchDispatchMode):
    """The size of the largest array that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out._is_view():
            self.size = max(self.size, out.numel())
        return out


LARGE = {
    "low rank": Case(lambda t: LowRank(*arrays(t, (128, 8), (8, 96)))),
    "tt": Case(lambda t: TTMatrix(arrays(t, (1, 8, 12, 6), (6, 16, 8, 1)))),
    "tucker": Case(tucker((4, 8, 128, 16), (3, 4, 20, 6)), (2,)),
    "cp": Case(cp((4, 8, 128, 16), 20), (2,)),
}


@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE.keys())
def test_the_dense_weight_is_not_made_for_a_row(case: Case) -> None:
    layer, x = case.layer(), rows_of(case, 1)
    with torch.no_grad(), Largest() as seen:
        layer(x)
    assert seen.size < layer.in_features * layer.out_features / 4


@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize("rows", [1, 20, 3000])
def test_multiplications_are_the_fewer_of_both_ways(case: Case, rows: int) -> None:
    layer, x = case.layer(bias=False), rows_of(case, rows)

    def count(call: Callable[[], Any]) -> float:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops() / 2

    through, out = count(lambda: layer.product(x)), count(lambda: x @ layer.matrix())
    assert through <= rows * layer.cost().per_row <= 1.2 * through
    if not isinstance(case.value(), CP):  # where entries are multiplied, which the counter leaves out
        assert layer.cost().forming == out - rows * layer.in_features * layer.out_features
    assert count(lambda: layer(x)) <= 1.05 * min(through, out)


# ----------------------------------------------------------------------------------------------------------- gradients


@each_case
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    layer, x = case.layer(), rows_of(case, 2).requires_grad_()
    names, factors = zip(*layer.named_parameters(), strict=True)

    def call(x: Any, *values: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *factors), fast_mode=True)


@each_case
def test_gradients_are_the_dense_ones_through_the_factors(case: Case) -> None:
    layer, x = case.layer(), rows_of(case, 40)
    ahead = torch.from_numpy(normal((40, layer.out_features), seed=7))
    layer(x).backward(ahead)
    factors = [p for name, p in layer.named_parameters() if name != "bias"]
    want = torch.autograd.grad(layer.matrix(), factors, x.T @ ahead)
    for factor, gradient in zip(factors, want, strict=True):
        assert_close(factor.grad.numpy(), gradient.numpy(), factor=1024)
    assert_close(layer.bias.grad.numpy(), ahead.sum(0).numpy())


@one_of_each
def test_training_leaves_the_value_alone(case: Case) -> None:
    value = case.value()
    with unchanged(*value.arrays()):
        layer = FactoredLinear.from_value(value, inputs=case.inputs)
        before = copy.deepcopy(layer.state_dict())
        layer(rows_of(case, 3)).square().sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert all(not torch.equal(before[name], now) for name, now in layer.state_dict().items())


# ----------------------------------------------------------------------------------------------- what modules can do


@each_case
@pytest.mark.parametrize("bias", [True, False])
def test_dense_layers(case: Case, bias: bool) -> None:
    layer, x = case.layer(bias=bias), rows_of(case, 6)
    dense = layer.to_dense()
    assert type(dense) is torch.nn.Linear
    assert (dense.bias is not None) is (layer.bias is not None) is bias
    assert_close(dense(x).detach().numpy(), layer(x).detach().numpy())
    assert dense.weight.requires_grad


def test_dense_weights_are_rounded_once() -> None:
    case = CASES["tucker, one leg read"]
    layer = case.layer(np.float32)
    weight = layer.to_dense().weight.detach().numpy()
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, copy.deepcopy(layer).double().matrix().detach().numpy().T.astype(np.float32))


@each_case
@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts(case: Case, bias: bool) -> None:
    layer, x, file = case.layer(bias=bias), rows_of(case, 6), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert ("bias" in saved) is bias
    merged = len(case.value().s) if isinstance(case.value(), SVD) else 0  # singular values, into both sides
    numbers = sum(a.size for a in case.value().arrays()) - merged
    assert sum(a.numel() for a in saved.values()) == numbers + bias * layer.out_features
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(saved)
    assert torch.equal(other(x), layer(x))


def test_names_of_parameters() -> None:
    names = [sorted(name for name, _ in case.layer().named_parameters()) for case in ONE_OF_EACH]
    factors = [f"factor{k}" for k in range(4)]
    assert names == [
        ["bias", "left", "right"],
        ["bias", "core0", "core1"],
        sorted(["bias", "core", *factors]),
        sorted(["bias", "weights", *factors]),
    ]


@each_case
def test_copies_are_independent(case: Case) -> None:
    layer, x = case.layer(), rows_of(case, 3)
    before, twin = layer(x), copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert torch.equal(layer(x), before)
    assert not torch.equal(twin(x), before)


def test_representation() -> None:
    assert repr(CASES["low rank"].layer()) == "ContractedLinear(in_features=12, out_features=10, parameters=66)"


@pytest.mark.slow
@one_of_each
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own parts
def test_compiled_without_a_break(case: Case) -> None:
    layer, x = case.layer(np.float32), rows_of(case, 6, dtype=np.float32)
    torch.compiler.reset()
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert_close(found.detach().numpy(), layer(x).detach().numpy(), np.float32)
    found.square().sum().backward()
    got = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), got, strict=True):
        assert_close(gradient.numpy(), parameter.grad.numpy(), np.float32, factor=256)


# --------------------------------------------------------------------------------------------------------- bad input


def test_what_is_no_factored_matrix() -> None:
    call = "FactoredLinear.from_value"
    with refused(TypeError, call, "value", "ndarray"):
        FactoredLinear.from_value(np.ones((3, 4)))
    with refused(TypeError, call, "value", "TensorTrain"):
        FactoredLinear.from_value(tnlib.tt_svd(np.ones((3, 4))).value)
    with refused(ValueError, call, "inputs", "LowRank"):
        FactoredLinear.from_value(CASES["low rank"].value(), inputs=(0,))
    for inputs in [1.5, "a", (4,), (-1,), (0, 0), (), (0, 1, 2, 3), (1.0,)]:
        with refused(ValueError, call, "inputs", repr(inputs)):
            FactoredLinear.from_value(CASES["cp, one leg read"].value(), inputs=inputs)
    for bias in (np.ones(9), np.ones((1, 10)), 1.0):
        with refused(ValueError, call, "bias", "(10,)"):
            FactoredLinear.from_value(CASES["low rank"].value(), bias=bias)
    with refused(TypeError, call, "bias must be"):
        FactoredLinear.from_value(CASES["low rank"].value(), bias=["a"] * 10)


@one_of_each
def test_input_of_another_width_is_refused(case: Case) -> None:
    layer = case.layer()
    n = layer.in_features
    for x in (torch.ones(2, n + 1), torch.ones(n - 1), torch.tensor(1.0), torch.ones(0), None, np.ones((2, n))):
        with refused(ValueError, type(layer).__name__, f"x must be a tensor of shape (..., {n})", "got"):
            layer(x)
