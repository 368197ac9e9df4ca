"""Every architecture compressed without a text and loaded by transformers, factors kept, beside the dense weights."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import read_tensors
from oracles import assert_close
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tnlib_adapters.transformers_plugin")

from tnlib_adapters import Budget, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.compress import factorise  # noqa: E402
from tnlib_adapters.compression.write import write_checkpoint  # noqa: E402
from tnlib_adapters.reference.model import run  # noqa: E402
from tnlib_adapters.transformers_plugin import FactoredLinear  # noqa: E402
from transformers_models import MODELS, inputs, loaded_like, outputs  # noqa: E402

LAYOUTS = ("factored", "dense")
# grouped and fused by blocks, grouped and fused by groups, biased and wider than the stream, renamed in memory
LATENT = sorted(name for name in MODELS if name.startswith("deepseek"))
OF_ALL_KINDS = ["phi3", "falcon_new", "llama_biases", "vit"]

Saved = Callable[[str], tuple[Any, Path]]


def write(source: Path, base: Path, method: str, keep: float = 0.5) -> tuple[Path, Path]:
    """Return the folders of both layouts, made from the same factors."""
    checkpoint = open_checkpoint(source)
    plan = factorise(checkpoint, method).plan(keep)
    for layout in LAYOUTS:
        (base / layout).mkdir()
        for _ in write_checkpoint(checkpoint, plan, layout, base / layout):
            pass
    return base / "factored", base / "dense"


def loaded(model: Any, folder: Path, **options: Any) -> Any:
    """Load as another model was, and find a place for every tensor and a tensor for every place."""
    kind = model.config._attn_implementation
    options |= {"attn_implementation": kind, "output_loading_info": True}
    found, info = type(model).from_pretrained(folder, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return found.eval()


def numbers(folder: Path) -> int:
    return sum(tensor.values.size for tensor in read_tensors(folder).values())


NAMES = sorted(name for name in MODELS if not name.startswith("deepseek"))


@pytest.mark.parametrize("method", mostly_slow(["heads", "matrix"], ["heads"]))
@pytest.mark.parametrize("name", mostly_slow(NAMES, NAMES[::8]))
def test_factors_compute_what_their_product_does(name: str, method: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    factored_folder, dense_folder = write(source, tmp_path, method)
    factored, dense, x = loaded(model, factored_folder), loaded_like(model, dense_folder), inputs(model)
    got = outputs(factored, x)
    assert_close(got, outputs(dense, x), np.float32, factor=256)
    assert np.abs(got - outputs(model, x)).max() > 1e-3 * np.abs(got).max()  # half of the numbers are gone
    layers = [module for module in factored.modules() if isinstance(module, FactoredLinear)]
    assert len(layers) == 4 * open_checkpoint(source).n_layers
    assert sum(p.numel() for p in factored.parameters()) == numbers(factored_folder)

    factored.save_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(outputs(loaded(model, tmp_path / "again"), x), got)
    ours, theirs = (open_checkpoint(folder).projections(1) for folder in (tmp_path / "again", factored_folder))
    for projection, weight in ours.weights.items():
        np.testing.assert_array_equal(weight, theirs.weights[projection])


@pytest.mark.parametrize("method", mostly_slow(["matrix", "ttm"], ["ttm"]))
@pytest.mark.parametrize("name", mostly_slow(LATENT, LATENT[::3]))
def test_attention_on_latent_vectors(name: str, method: str, saved: Saved, tmp_path: Path) -> None:
    """Its matrices are factored one by one, as are those of feed-forward layers."""
    model, source = saved(name)
    factored_folder, dense_folder = write(source, tmp_path, method, keep=0.45)
    factored, dense, x = loaded(model, factored_folder), loaded_like(model, dense_folder), inputs(model)
    got = outputs(factored, x)
    assert_close(got, outputs(dense, x), np.float32, factor=256)
    assert_close(run(open_checkpoint(factored_folder), x).logits, got, np.float32, factor=256)
    assert np.abs(got - outputs(model, x)).max() > 1e-3 * np.abs(got).max()
    described = open_checkpoint(factored_folder).factored or []
    assert len(described) >= 4  # of 8 or 10: small matrices may stay
    assert len([module for module in factored.modules() if isinstance(module, FactoredLinear)]) == len(described)
    factored.save_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(outputs(loaded(model, tmp_path / "again"), x), got)
    assert_close(outputs(factored.dequantize(), x), got, np.float32, factor=256)


@pytest.mark.parametrize("method", ["ttm", "tucker", "cp"])
@pytest.mark.parametrize("name", mostly_slow(OF_ALL_KINDS, OF_ALL_KINDS[::2]))
def test_other_methods(name: str, method: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    factored_folder, dense_folder = write(source, tmp_path, method)
    factored, x = loaded(model, factored_folder, dtype=torch.float64), inputs(model)
    want = outputs(loaded_like(model, dense_folder), x)
    x = x.astype(np.float64) if x.dtype == np.float32 else x  # images
    assert_close(outputs(factored, x), want, np.float32, factor=256)
    assert_close(outputs(factored.dequantize(), x), want, np.float32, factor=256)


def test_dense_weights_are_what_the_reader_multiplies_out(saved: Saved, tmp_path: Path) -> None:
    factored_folder, dense_folder = write(saved("qwen3_biases")[1], tmp_path, "heads")
    ours, theirs = (open_checkpoint(folder).projections(0) for folder in (factored_folder, dense_folder))
    for name, weight in ours.weights.items():
        assert_close(theirs.weights[name], weight, np.float32)
    for name, bias in ours.biases.items():
        assert_close(theirs.biases[name], bias, np.float32)


@pytest.mark.parametrize("name", ["llama_3", "falcon_new", "gpt_neox", "phi"])
def test_all_numbers_kept_is_the_model(name: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    x = inputs(model)
    factored, _ = write(source, tmp_path, "heads", keep=1.0)
    assert_close(outputs(loaded(model, factored), x), outputs(model, x), np.float32, factor=512)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "heads") for name in ("gptj", "llama_biases", "gemma2", "falcon_new", "qwen3", "bloom", "t5")),
        ("deepseek_v3", "matrix"),
    ],
)
def test_generation_with_a_cache(name: str, method: str, saved: Saved, tmp_path: Path) -> None:
    """One token after the other, as the dense model writes."""
    model, source = saved(name)
    factored_folder, dense_folder = write(source, tmp_path, method)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = torch.arange(2, 10).reshape(2, 4)
    kind = model.config._attn_implementation
    written = [
        type(model)
        .from_pretrained(folder, dtype=torch.float64, attn_implementation=kind)
        .eval()
        .generate(tokens, **options)
        for folder in (factored_folder, dense_folder)
    ]
    assert written[0].shape == (2, 7 if model.config.is_encoder_decoder else 10)  # a decoder begins with one token
    assert torch.equal(*written)


@pytest.mark.parametrize("name", ["qwen3_biases", "bloom", "vit", "falcon_new"])
def test_from_end_to_end(name: str, saved: Saved, tmp_path: Path, without_pictures: None) -> None:
    """The report counts what is stored, and errors are those of the operators that were written."""
    _, source = saved(name)
    report = compress(source, tmp_path / "out", Budget(keep=0.5), what="attention")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert numbers(source) - numbers(tmp_path / "out") == report.n_before - report.n_after
    assert 0.49 <= report.kept <= 0.5
    assert len(report.heads) == before.n_layers * before.sizes.n_heads
    for head in report.heads:
        old, new = (one.attention(head.layer).ov(head.head).full() for one in (before, after))
        assert head.ov_error == pytest.approx(np.linalg.norm(old - new) / np.linalg.norm(old), rel=1e-4)
        old, new = (one.attention(head.layer).numerator().qk(head.head, 0).full() for one in (before, after))
        assert head.qk_error == pytest.approx(np.linalg.norm(old - new) / np.linalg.norm(old), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_without_the_import_transformers_refuses(name: str, saved: Saved, tmp_path: Path) -> None:
    """It would otherwise start with random attention, and say so in a warning only."""
    model, source = saved(name)
    folder, _ = write(source, tmp_path, "heads")
    program = f"import transformers; transformers.{type(model).__name__}.from_pretrained({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "import tnlib_adapters.transformers_plugin" in done.stderr
    assert "got tnlib" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), [("llama_biases", "heads"), ("phi3", "tucker")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own parts
def test_compiled_without_a_break(name: str, method: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    factored = loaded(model, write(source, tmp_path, method)[0])
    tokens = torch.from_numpy(inputs(model))
    torch.compiler.reset()
    compiled = torch.compile(factored, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close(compiled(tokens).logits.numpy(), factored(tokens).logits.numpy(), np.float32)


@pytest.mark.parametrize("name", ["llama_tied", "falcon_new"])
def test_shards_in_half_precision(name: str, saved: Saved, tmp_path: Path) -> None:
    """Factors are stored in the dtype of the weights, in the files where those were."""
    model, _ = saved(name)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path / "in", max_shard_size="5KB")
    factored_folder, dense_folder = write(tmp_path / "in", tmp_path, "heads")
    assert {tensor.dtype for tensor in read_tensors(factored_folder).values()} == {"BF16"}
    assert len({tensor.file for tensor in read_tensors(factored_folder).values()}) > 2
    factored, x = loaded(model, factored_folder, dtype=torch.float32), inputs(model)
    got = outputs(factored, x)
    assert_close(got, outputs(factored.dequantize(), x), np.float32, factor=256)
    rounded = outputs(type(model).from_pretrained(dense_folder, dtype=torch.float32).eval(), x)
    assert np.abs(got - rounded).max() < 0.1 * np.abs(rounded).max()  # factors and their product are rounded apart
