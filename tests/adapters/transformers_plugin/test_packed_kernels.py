"""Products with integers by torch's packed kernels beside those with dequantized values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import normal, refused

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tnlib_adapters import Budget, compress  # noqa: E402
from tnlib_adapters.factors.factored_matrix import scale_name  # noqa: E402
from tnlib_adapters.factors.integers import IntegerFormat, Integers, round_to_nearest  # noqa: E402
from tnlib_adapters.factors.interpolative import pack  # noqa: E402
from tnlib_adapters.transformers_plugin import InterpolativeLinear, keep_dequantized, use_packed_kernels  # noqa: E402
from tnlib_adapters.transformers_plugin.inference_layers import PackedProduct  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tnlib import ArgumentError, ArgumentTypeError  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")
ROUNDING = 2.0**-7  # of bfloat16, of values and of results


def differ(found: Any, wanted: Any) -> float:
    """The difference relative to the norm."""
    found, wanted = (torch.as_tensor(a).detach().double() for a in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


def rounded(a: np.ndarray, form: IntegerFormat) -> Integers:
    """An array in integers, whose scales are numbers of bfloat16, as the kernels take them."""
    own = round_to_nearest(a.astype(np.float32), form)
    scales = torch.from_numpy(own.scales).bfloat16().float().numpy()
    return Integers(own.codes, scales, form)


PACKED = [IntegerFormat(bits, 0, group) for bits in (4, 3, 2) for group in (0, 64)]


@pytest.mark.parametrize("form", [IntegerFormat(8, 0), IntegerFormat(8, 1), *PACKED], ids=str)
@pytest.mark.parametrize("shape", [(64, 16), (130, 33), (7, 1), (200, 64)])
@pytest.mark.parametrize("n_rows", [1, 5])
def test_kernels_multiply_by_the_stored_values(form: IntegerFormat, shape: tuple[int, int], n_rows: int) -> None:
    integers = rounded(normal(shape, seed=0), form)
    assert PackedProduct.holds(shape, form)
    kernel = PackedProduct(torch.from_numpy(integers.codes), torch.from_numpy(integers.scales), form)
    x = torch.from_numpy(normal((n_rows, 1, shape[0]), seed=1)).bfloat16()
    wanted = x.double() @ torch.from_numpy(integers.values(np.float64))
    with torch.no_grad():
        assert kernel.takes(x)
        assert kernel(x).shape == wanted.shape
        assert differ(kernel(x), wanted) <= ROUNDING
    assert not kernel.takes(x), "kernels have no derivatives"


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((200, 64), IntegerFormat(5, 0, 64)),
        ((40, 16), IntegerFormat(5, 0, 64)),  # one group
        ((40, 16), IntegerFormat(6, 0, 0)),
        ((200, 64), IntegerFormat(4, 1, 64)),
        ((200, 64), IntegerFormat(4, 0, 32)),
        ((200, 64, 2), IntegerFormat(8, 0)),
        ((200, 64), IntegerFormat(8, (0, 1))),
        ((0, 64), IntegerFormat(8, 0)),  # of rank 0
        ((200, 0), IntegerFormat(4, 0, 64)),
    ],
    ids=str,
)
def test_other_formats_have_no_kernel(shape: tuple[int, ...], form: IntegerFormat) -> None:
    assert not PackedProduct.holds(shape, form)


def test_kernels_run_on_the_cpu_in_bfloat16() -> None:
    form = IntegerFormat(8, 0)
    integers = rounded(normal((64, 16), seed=0), form)
    kernel = PackedProduct(torch.from_numpy(integers.codes), torch.from_numpy(integers.scales), form)
    x = torch.ones(16, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert kernel.takes(x)
        assert kernel(x[:0]).shape == (0, 16)
        for other in (torch.ones(17, 64, dtype=torch.bfloat16), x.float(), x.to("meta")):
            assert not kernel.takes(other)
        assert not kernel.to("meta").takes(x.to("meta"))
        assert not kernel.to_empty(device="cpu").float().takes(x)


def kernels(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PackedProduct)]


@pytest.mark.parametrize(
    ("store", "keep"), [("int8", 0.5), ("int4", 0.5), ("int4", 1), ("int3", 0.5)]
)  # factors and whole weights
def test_a_model_computes_the_same(store: str, keep: float, saved: Any, tmp_path: Path) -> None:
    _, source = saved("llama")
    compress(source, tmp_path / "out", Budget(keep=keep, store=store), what="all", method="matrix")
    load = AutoModelForCausalLM.from_pretrained
    exact, half = (load(tmp_path / "out", dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16))
    few, many = (torch.arange(n)[None] for n in (4, 20))
    names = set(half.state_dict())
    with torch.no_grad():
        wanted, by_values, of_many = exact(few).logits, half(few).logits, half(many).logits
        assert use_packed_kernels(half) is half
        integers = {name for name, own in half.named_parameters() if not own.is_floating_point()}
        assert len(kernels(half)) == len([name for name in integers if "embed" not in name]) >= 14
        by_kernels = half(few).logits
        assert torch.equal(half(many).logits, of_many), "many rows are multiplied by dequantized values"
    assert differ(by_kernels, wanted) <= 2 * differ(by_values, wanted)
    assert not torch.equal(by_kernels, by_values)
    assert set(half.state_dict()) == names
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert half.generate(few, attention_mask=torch.ones_like(few), **options).shape == (1, 7)


@pytest.mark.parametrize("bias", ["none", "stored row", "unit row"])
@pytest.mark.parametrize("bits", [8, 4])
def test_interpolative_layers(bits: int, bias: str) -> None:
    left = normal((40 + (bias != "none"), 3), seed=0)
    if bias != "none":
        left[-1] *= 100.0 if bias == "unit row" else 1e-2  # pivots are the largest rows
    rest, new, rows = pack(left, normal((3, 20), seed=1))
    layer = InterpolativeLinear({"left": torch.from_numpy(rest), "right": torch.from_numpy(new)}, rows, 40)
    formats = dict.fromkeys(("left", "right"), IntegerFormat(bits, 0, 64 * (bits < 8)))
    parameters = {}
    for name, a in (("left", rest), ("right", new)):
        own = rounded(a, formats[name])
        parameters[name] = torch.nn.Parameter(torch.from_numpy(own.stored()), requires_grad=False)
        parameters[scale_name(name)] = torch.nn.Parameter(torch.from_numpy(own.scales))
    layer.set_parameters(parameters, formats)
    layer.settle()
    x = torch.from_numpy(normal((2, 40), seed=2)).bfloat16()
    with torch.no_grad():
        wanted, wanted_product = layer(x.float()), layer.product(x.float())
        layer.bfloat16()
        use_packed_kernels(layer)
        assert len(kernels(layer)) == 2
        assert differ(layer(x), wanted) <= 2 * ROUNDING
        assert differ(layer.product(x), wanted_product) <= 2 * ROUNDING


def test_a_kernel_compiles_without_a_break() -> None:
    form = IntegerFormat(4, 0, 64)
    integers = rounded(normal((70, 20), seed=0), form)
    kernel = PackedProduct(torch.from_numpy(integers.codes), torch.from_numpy(integers.scales), form)
    x = torch.from_numpy(normal((2, 70), seed=1)).bfloat16()
    with torch.no_grad():
        assert torch.equal(torch.compile(kernel, backend="eager", fullgraph=True)(x), kernel(x))


def test_kernels_beside_other_copies(saved: Any, tmp_path: Path) -> None:
    """A dequantized copy is for many rows; another dtype, and `dequantize`, go without kernels."""
    _, source = saved("llama")
    compress(source, tmp_path / "out", Budget(keep=0.5, store="int8"), method="matrix", what="attention")
    load = AutoModelForCausalLM.from_pretrained
    exact, half = (load(tmp_path / "out", dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16))
    few, many = (torch.arange(n)[None] for n in (4, 20))
    with torch.no_grad():
        wanted, of_many = exact(few).logits, half(many).logits
        by_kernels = use_packed_kernels(half)(few).logits
        keep_dequantized(half)
        assert torch.equal(half(few).logits, by_kernels)
        assert torch.equal(half(many).logits, of_many)
        keep_dequantized(half, keep=False)
        assert differ(half.float()(few).logits, wanted) <= 2 * ROUNDING
        dense = use_packed_kernels(load(tmp_path / "out", dtype=torch.bfloat16)).dequantize()
        assert not kernels(dense)
        assert differ(dense.float()(few).logits, wanted) <= 2 * ROUNDING


def test_models_without_a_kernel_are_refused(saved: Any, tmp_path: Path) -> None:
    model, source = saved("llama")
    for other in (model, torch.nn.ReLU()):
        with refused(ArgumentError, "use_packed_kernels: model must have weights", "got none", "store="):
            use_packed_kernels(other)
    with refused(ArgumentTypeError, "use_packed_kernels: model must be a module", "got PosixPath", "from_pretrained"):
        use_packed_kernels(tmp_path)
    load = AutoModelForCausalLM.from_pretrained
    compress(source, tmp_path / "out", Budget(keep=0.5, store="int8"), method="matrix", what="attention")
    with refused(ArgumentError, "use_packed_kernels: model must be in torch.bfloat16", "float32 on cpu", "dtype="):
        use_packed_kernels(load(tmp_path / "out", dtype=torch.float32))
    compress(source, tmp_path / "tucker", Budget(keep=0.5, store="int8"), method="tucker", what="attention")
    with refused(ArgumentError, "use_packed_kernels: model must have weights", "got none", "use_linear_layers"):
        use_packed_kernels(load(tmp_path / "tucker", dtype=torch.bfloat16))
