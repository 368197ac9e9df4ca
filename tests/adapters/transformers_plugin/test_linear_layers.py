"""Interpolative layers in both of their forms, and ordinary linear layers in place of factored ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import assert_close
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from compressed_folders import by_options  # noqa: E402
from tnlib_adapters import Budget, compress  # noqa: E402
from tnlib_adapters.factors.interpolative import pack  # noqa: E402
from tnlib_adapters.transformers_plugin import FactoredLinear, InterpolativeLinear, use_linear_layers  # noqa: E402
from tnlib_adapters.transformers_plugin.contracted_linear import LOW_RANK, ContractedLinear  # noqa: E402
from tnlib_adapters.transformers_plugin.factored_linear import Factors  # noqa: E402
from transformers import AutoModel  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")
BIASES = ("none", "stored row", "unit row")


def interpolative(bias: str, m: int = 12, r: int = 3, n: int = 7) -> tuple[InterpolativeLinear, np.ndarray]:
    """A layer, and its matrix with the bias as one more row, which is a unit row of the left factor or is stored."""
    rng = np.random.default_rng(r)
    left = rng.standard_normal((m + (bias != "none"), r))
    if bias != "none":
        left[-1] *= 100.0 if bias == "unit row" else 1e-3  # pivots are the largest rows
    right = rng.standard_normal((r, n))
    rest, new, rows = pack(left, right)
    assert (m in rows) == (bias == "unit row")
    layer = InterpolativeLinear(Factors.of_arrays({"left": rest, "right": new}), rows, m)
    layer.settle()
    return layer, left @ right


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("n_rows", [1, 2, 300])
def test_both_forms_of_an_interpolative_layer(n_rows: int, bias: str) -> None:
    """Few rows take columns of the input apart, many multiply by the whole left factor."""
    layer, matrix = interpolative(bias)
    x = np.random.default_rng(n_rows).standard_normal((n_rows, 12))
    wanted = x @ matrix[:12] + (0 if bias == "none" else matrix[12])
    with torch.no_grad():
        assert_close(layer(torch.from_numpy(x)).numpy(), wanted, np.float64, factor=64)
        assert_close(layer.product(torch.from_numpy(x)).numpy(), x @ matrix[:12], np.float64, factor=64)


@pytest.mark.parametrize("bias", BIASES)
def test_gradients_of_both_forms_are_equal(bias: str) -> None:
    layer, _ = interpolative(bias)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((300, 12)))
    gradients = []
    for blocks in ([x], x.split(1)):
        layer.zero_grad()
        torch.cat([layer(block) for block in blocks]).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
    for many, few in zip(*gradients, strict=True):
        assert_close(many.numpy(), few.numpy(), np.float64, factor=1000)


@pytest.mark.parametrize("bias", mostly_slow(BIASES, ["stored row"]))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own parts
def test_an_interpolative_layer_compiles_without_a_break(bias: str) -> None:
    layer, _ = interpolative(bias)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for n_rows in (2, 300):
        x = torch.from_numpy(np.random.default_rng(0).standard_normal((n_rows, 12)))
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))


def test_rank_zero_becomes_layers_of_zeros() -> None:
    layer = ContractedLinear(
        Factors.of_arrays({"left": np.zeros((64, 0), np.float32), "right": np.zeros((0, 48), np.float32)}), LOW_RANK
    )
    linear = use_linear_layers(torch.nn.Sequential(layer))
    assert len(linear[0]) == 2
    assert bool((linear(torch.ones(2, 64)) == 0).all())


@pytest.mark.slow
def test_low_rank_becomes_two_layers_and_the_rest_one(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    compress(folders["bert"], tmp_path / "out", Budget(keep=0.4), calibration=text, what="all")
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, InterpolativeLinear)}
    expected = {name: min(r8(layer) * sum(sizes(layer)), np.prod(sizes(layer))) for name, layer in layers.items()}
    tokens = torch.arange(2, 12).reshape(2, 5)
    with torch.no_grad():
        wanted = model(tokens).last_hidden_state.numpy()
        assert use_linear_layers(model) is model
        assert_close(model(tokens).last_hidden_state.numpy(), wanted, np.float32, factor=64)
    assert not any(isinstance(module, FactoredLinear) for module in model.modules())
    for name, count in expected.items():
        weights = [p for p in model.get_submodule(name).parameters() if p.ndim == 2]
        assert len(weights) in (1, 2)
        assert sum(p.numel() for p in weights) == count
        assert len(weights) == 1 or weights[0].shape[0] % 8 == 0


def r8(layer: InterpolativeLinear) -> int:
    """The rank as a multiple of 8; 8 for rank 0."""
    return -(-max(1, len(layer.unit_rows)) // 8) * 8


def sizes(layer: InterpolativeLinear) -> tuple[int, int]:
    return layer.in_features, layer.out_features


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert", {"method": "heads"}),
        ("bert", {"method": "matrix", "what": "all", "store": "int8"}),
        ("gpt2", {"method": "matrix", "what": "all"}),
        ("gpt2", {"method": "tucker"}),
        ("gpt_neox", {"method": "matrix", "store": "int4"}),
    ],
    ids=str,
)
def test_every_kind_of_factors(
    name: str, options: dict[str, Any], saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    compress(saved(name)[1], tmp_path / "out", **by_options(keep=0.5, **options))
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(2, 12).reshape(2, 5)
    with torch.no_grad():
        wanted = model(tokens).last_hidden_state.numpy()
        found = use_linear_layers(model)(tokens).last_hidden_state.numpy()
    assert_close(found, wanted, np.float32, factor=64)
    assert not any(isinstance(module, FactoredLinear) for module in model.modules())
