"""Products with integers by kernels beside those with dequantized values, alone and in a model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import normal
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tnlib_adapters import Budget, compress  # noqa: E402
from tnlib_adapters.factors.factored_matrix import scale_name  # noqa: E402
from tnlib_adapters.factors.integers import IntegerFormat  # noqa: E402
from tnlib_adapters.factors.interpolative import pack  # noqa: E402
from tnlib_adapters.factors.rounding import round_to_nearest  # noqa: E402
from tnlib_adapters.transformers_plugin import ContractedLinear, InterpolativeLinear, keep_dequantized  # noqa: E402
from tnlib_adapters.transformers_plugin.contracted_linear import whole  # noqa: E402
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, Factors  # noqa: E402
from tnlib_adapters.transformers_plugin.integer_tensors import FewVectorProducts, dequantized  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")
SHAPE = (200, 330)  # large enough for a kernel, and of no round size
SINGLE = 1e-5
QUICK = [IntegerFormat(8, 0), IntegerFormat(8, 1), *(IntegerFormat(bits, a, 64) for bits in (3, 4) for a in (0, 1))]
FORMS = mostly_slow([*QUICK, *(IntegerFormat(bits, a, 64) for bits in (2, 5, 6) for a in (0, 1))], quick=QUICK)


def multiply_few(*arguments: Any, transposed: bool) -> Any:
    """The product by kernels, prepared anew."""
    return FewVectorProducts().multiply("weight", *arguments, transposed=transposed)


def differ(found: Any, wanted: Any) -> float:
    """The difference relative to the norm."""
    found, wanted = (torch.as_tensor(a).detach().double() for a in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


def stored(form: IntegerFormat, shape: tuple[int, ...] = SHAPE) -> tuple[Any, Any, Any]:
    """Codes and scales of a matrix, and its values in double precision."""
    own = round_to_nearest(normal(shape, seed=0).astype(np.float32), form, search=False)
    return torch.from_numpy(own.stored()), torch.from_numpy(own.scales), torch.from_numpy(own.values(np.float64))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_with_few_vectors(form: IntegerFormat) -> None:
    codes, scales, values = stored(form)
    for transposed in (False, True):
        matrix = values.T if transposed else values
        x = torch.from_numpy(normal((2, 3, len(matrix)), seed=1)).float()
        with torch.no_grad():
            y = multiply_few(x, codes, scales, form, transposed=transposed)
            if form.is_packed and form.axis != int(transposed):
                assert y is None, "groups lie across the sums"
                continue
            assert y is not None
            assert y.dtype == x.dtype
            assert differ(y, x.double() @ matrix) < SINGLE
            half = multiply_few(x.bfloat16(), codes, scales, form, transposed=transposed)
            assert half.dtype == torch.bfloat16
            assert differ(half, x.bfloat16().double() @ matrix) < 2.0**-8


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_are_those_of_torch(form: IntegerFormat, dtype: Any) -> None:
    codes, scales, values = stored(form)
    found = dequantized(codes, scales, form, form.axes[0], SHAPE[form.axes[0]], dtype)
    trained = dequantized(codes, scales.requires_grad_(), form, form.axes[0], SHAPE[form.axes[0]], dtype)
    assert torch.equal(found, trained), "the same values with gradients, which no kernel has"
    assert trained.requires_grad
    if form.is_packed or dtype != torch.bfloat16:  # scales of int8 are rounded too
        assert torch.equal(found, values.to(dtype))


def test_no_kernel_where_another_way_is_needed() -> None:
    form = IntegerFormat(4, 0, 64)
    codes, scales, _ = stored(form)
    x = torch.ones(8, SHAPE[0])
    with torch.no_grad():
        assert multiply_few(x, codes, scales, form, transposed=False) is not None
        refused = [
            (torch.ones(9, SHAPE[0]), codes, scales),  # BLAS is faster
            (x[:0], codes, scales),
            (x.double(), codes, scales),
            (x.to("meta"), codes.to("meta"), scales.to("meta")),
            (x[:, :8], codes[:, :4][:9], scales[:1, :9]),  # not worth a compilation
        ]
        assert all(multiply_few(*arguments, form, transposed=False) is None for arguments in refused)
        assert multiply_few(x, codes, scales, IntegerFormat(8, (0, 1)), transposed=False) is None
    assert multiply_few(x, codes, scales, form, transposed=False) is None, "kernels have no derivatives"


def layer_of(form: IntegerFormat) -> FactoredLinear:
    """A layer whose weight is held in integers."""
    codes, scales, _ = stored(form)
    parameters = {"weight": torch.nn.Parameter(codes, requires_grad=False), "weight_scale": torch.nn.Parameter(scales)}
    assert scale_name("weight") in parameters
    return ContractedLinear(Factors({"weight": SHAPE}, {"weight": form}, parameters), whole("weight"))


def test_a_layer_compiles_without_a_break() -> None:
    layer = layer_of(IntegerFormat(4, 0, 64))
    x = torch.from_numpy(normal((2, SHAPE[0]), seed=1)).float()
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
        assert differ(compiled, layer(x)) < SINGLE


def test_a_kept_copy_is_multiplied() -> None:
    layer = layer_of(IntegerFormat(4, 0, 64))
    x = torch.from_numpy(normal((2, SHAPE[0]), seed=1)).float()
    with torch.no_grad():
        before = layer(x)
        layer.keep_values()
        assert differ(layer(x), before) < SINGLE
        scale: Any = layer.weight_scale
        scale.mul_(2)  # does not reach the copy
        assert differ(layer(x), before) < SINGLE
        layer.keep_values(keep=False)
        assert differ(layer(x), 2 * before) < SINGLE


@pytest.mark.parametrize("form", [IntegerFormat(4, 0, 64), IntegerFormat(8, 0), IntegerFormat(8, 1)], ids=str)
def test_a_prepared_product_follows_its_parameters(form: IntegerFormat) -> None:
    layer = layer_of(form)
    x = torch.from_numpy(normal((1, SHAPE[0]), seed=1)).float()
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before), "prepared"
        weight, scale = layer.weight, layer.weight_scale
        scale.data.mul_(2)
        assert differ(layer(x), 2 * before) < SINGLE
        layer.weight_scale = torch.nn.Parameter(scale * 2)
        assert differ(layer(x), 4 * before) < SINGLE
        layer.weight = torch.nn.Parameter(weight.flip(0), requires_grad=False)
        assert differ(layer(x), 4 * before) > 0.1
        layer.weight = weight
        copied = copy.deepcopy(layer)
        copied.weight_scale.mul_(0.5)
        assert differ(copied(x), 2 * before) < SINGLE
        assert differ(layer(x), 4 * before) < SINGLE
        assert len(pickle.dumps(layer._products)) < 200, "without the weights"
        layer.double()
        assert differ(layer(x.double()), 4 * before) < SINGLE
        layer.bfloat16()
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        scale = layer.weight_scale
        half = layer(x.bfloat16())
        scale.data.mul_(2)
        assert differ(layer(x.bfloat16()), 2 * half) < SINGLE, "scales of another dtype are copied in every call"


@pytest.mark.parametrize("bias", ["none", "stored row", "unit row"])
@pytest.mark.parametrize("bits", [8, 4])
def test_interpolative_layers(bits: int, bias: str) -> None:
    n, rank, n_out = 300, 110, 320
    left = normal((n + (bias != "none"), rank), seed=0)
    if bias != "none":
        left[-1] *= 100.0 if bias == "unit row" else 1e-2  # pivots are the largest rows
    rest, new, rows = pack(left, normal((rank, n_out), seed=1))
    formats = dict.fromkeys(("left", "right"), IntegerFormat(bits, 0, 64 * (bits < 8)))
    parameters = {}
    for name, a in (("left", rest), ("right", new)):
        own = round_to_nearest(a.astype(np.float32), formats[name])
        parameters[name] = torch.nn.Parameter(torch.from_numpy(own.stored()), requires_grad=False)
        parameters[scale_name(name)] = torch.nn.Parameter(torch.from_numpy(own.scales))
    layer = InterpolativeLinear(Factors({"left": rest.shape, "right": new.shape}, formats, parameters), rows, n)
    layer.settle()
    x = torch.from_numpy(normal((2, n), seed=2)).float()
    wanted, wanted_product = layer(x), layer.product(x)  # with gradients, and so by values
    with torch.no_grad():
        assert differ(layer(x), wanted) < SINGLE
        assert differ(layer.product(x), wanted_product) < SINGLE
        assert not torch.equal(layer(x), wanted), "kernels sum in another order"


@pytest.mark.parametrize("store", ["int8", "int4", "int3"])
@pytest.mark.parametrize("keep", [1, 0.5])  # whole weights and factors
def test_a_model_computes_the_same(store: str, keep: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "in")
    compress(tmp_path / "in", tmp_path / "out", Budget(keep=keep, store=store), what="all", method="matrix")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    few, many = (torch.arange(length)[None] for length in (4, 20))
    with torch.no_grad():
        by_kernels, of_many = model(few).logits, model(many).logits
    assert differ(by_kernels, model(few).logits) < SINGLE, "with gradients, and so by values"
    with torch.no_grad():
        assert differ(of_many[:, :4], by_kernels) < SINGLE
        keep_dequantized(model)
        assert differ(by_kernels, model(few).logits) < SINGLE
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        copied = model.generate(few, attention_mask=torch.ones_like(few), **options)
        keep_dequantized(model, keep=False)
        assert torch.equal(model.generate(few, attention_mask=torch.ones_like(few), **options), copied)
