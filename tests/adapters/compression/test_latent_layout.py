"""`--layout mla`: the written DeepSeek-V3, loaded by transformers alone, beside latent attention without a norm."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import change_config
from oracles import assert_close, normal, refused

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402
from padded_models import stated  # noqa: E402
from slow_cases import mostly_slow  # noqa: E402
from tnlib_adapters import builtin_path, cli, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.evaluation.evaluate import evaluate  # noqa: E402
from tnlib_adapters.compression.layouts.latent_factors import (  # noqa: E402
    KeyMoments,
    frequency_groups,
    latent_factors,
)
from tnlib_adapters.compression.layouts.latent_norm import EPS, linear_norm  # noqa: E402
from tnlib_adapters.factors.projections import Projections, Sizes  # noqa: E402
from tnlib_adapters.instrument.latent_attention import LatentAttention, LatentShape  # noqa: E402
from tnlib_adapters.reference.model import run  # noqa: E402
from transformers_models import (  # noqa: E402
    inputs,
    outputs,
    random_model,
    save_with_tokenizer,
)

from benchmarks.smaller_models import PAPERS, convert  # noqa: E402
from tnlib import ArgumentError  # noqa: E402

SIZES = {"kv_lora_rank": 5, "qk_rope_head_dim": 4}
HELD = ("llama", "llama_tied", "mistral_whole", "phi3")


pytestmark = pytest.mark.usefixtures("few_layout_steps", "without_pictures")


def loaded(folder: Path) -> Any:
    """The model as transformers loads it, with a place for every tensor and a tensor for every place."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    return model.eval()


def truncated(model: Any, folder: Path) -> Any:
    """The original model in double precision, with the latent attention and the matrices of a folder, without norm."""
    new, written, config = copy.deepcopy(model).double(), loaded(folder).double(), stated(folder)
    stream = float((EPS / model.config.rms_norm_eps) ** 0.5)
    rank, n = config["kv_lora_rank"], config["qk_rope_head_dim"]
    frequencies = config["rope_theta"] ** (-np.arange(0, n, 2) / n)
    shape = LatentShape(
        config["num_attention_heads"],
        rank,
        config["qk_nope_head_dim"],
        config["v_head_dim"],
        tuple(frequencies.tolist()),
        float((config["qk_nope_head_dim"] + n) ** -0.5),
    )
    for old, own in zip(new.model.layers, written.model.layers, strict=True):
        attention = own.self_attn
        latent = attention.kv_a_layernorm.weight / EPS**0.5
        down = attention.kv_a_proj_with_mqa.weight.detach().T.clone()
        down[:, :rank] *= latent.detach()
        output = torch.nn.Linear(1, 1, bias=False)
        output.weight.data = attention.o_proj.weight.data / stream
        old.self_attn.forward = LatentAttention(
            shape, attention.q_proj.weight.detach().T, down, attention.kv_b_proj.weight.detach().T, output
        )
        old.mlp = own.mlp
        old.mlp.down_proj.weight.data /= stream
    return new


# --------------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("name", mostly_slow(HELD, ["llama"]))
def test_latent_attention_computes_what_the_truncation_does(
    name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    source, out = folders[name], tmp_path / "out"
    report = compress(source, out, layout="mla", sizes=SIZES, calibrate=short_text)
    model = random_model(name)
    x, written, sizes = inputs(model), loaded(out), open_checkpoint(source).sizes
    want = outputs(truncated(model, out), x)
    assert_close(outputs(written, x), want, np.float32, factor=84)  # 1e-5
    assert_close(run(open_checkpoint(out), x).logits, want, np.float32, factor=84)
    assert np.abs(want - outputs(model, x)).max() > 1e-3 * np.abs(want).max()
    before = 4 * sizes.n_layers * sizes.kv_heads * (sizes.d_head + sizes.d_value)
    assert report.cache_bytes == {"before": before, "after": 4 * sizes.n_layers * 9}
    assert evaluate(source, out, short_text).cache_bytes == (before, 4 * sizes.n_layers * 9)


@pytest.mark.parametrize("paper", [None, *PAPERS])
def test_one_key_head_is_held_exactly(paper: str | None, short_text: Path, tmp_path: Path) -> None:
    """All planes of one key head rotate in the shared key, and a latent as wide as its values holds these.

    So it is by the conversions of the benchmark.
    """
    torch.manual_seed(0)
    config = random_model("llama").config
    config.num_key_value_heads = 1
    model = transformers.LlamaForCausalLM(config).eval()
    source = save_with_tokenizer(model, tmp_path / "in")
    width = open_checkpoint(source).sizes.d_head
    sizes = {"kv_lora_rank": width, "qk_rope_head_dim": width}
    if paper is None:
        compress(source, tmp_path / "out", layout="mla", sizes=sizes, calibrate=short_text)
    else:
        convert(source, tmp_path / "out", paper, sizes, short_text)
    assert stated(tmp_path / "out")["rope_theta"] == pytest.approx(1e4)
    assert_close(outputs(loaded(tmp_path / "out"), inputs(model)), outputs(model, inputs(model)), np.float32, 84)


@pytest.mark.slow
def test_generation_without_tnlib(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(folders["llama"], out, layout="mla", sizes=SIZES, calibrate=short_text)
    program = (
        "import sys, torch, transformers\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(out)!r}).eval()\n"
        "x = torch.tensor([[2, 3, 5, 7]])\n"
        "y = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=8, do_sample=False, pad_token_id=0, "
        "eos_token_id=None)\n"
        "assert not any(name.startswith('tnlib') for name in sys.modules)\n"
        "print(y[0].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens = torch.tensor([[2, 3, 5, 7]])
    model = truncated(random_model("llama"), out)
    for _ in range(8):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert done.stdout.strip() == str(tokens[0].tolist())


# Keys that the model files of engines read where no layer has experts: vLLM 002d607,
# vllm/model_executor/models/deepseek_v2.py; SGLang, python/sglang/srt/models/deepseek_v2.py; llama.cpp,
# conversion/deepseek.py, which takes q_lora_rank 0 for none
READ_BY_ENGINES = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 2,
    "hidden_act": "silu",
    "hidden_size": 24,
    "intermediate_size": 40,
    "kv_lora_rank": 5,
    "max_position_embeddings": 32,
    "moe_intermediate_size": 40,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 6,
    "vocab_size": 50,
}


def test_the_keys_of_engines_are_stated(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    compress(folders["llama"], tmp_path / "out", layout="mla", sizes=SIZES, calibrate=short_text)
    config = stated(tmp_path / "out")
    assert {key: config.get(key, "missing") for key in READ_BY_ENGINES} == READ_BY_ENGINES | {
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
    }
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}


@pytest.mark.slow
def test_the_command_line(short_text: Path, tmp_path: Path) -> None:
    arguments = ["compress", "builtin-llama", str(tmp_path / "out"), "--layout", "mla", "--calibrate", str(short_text)]
    sizes = ["--size", "kv_lora_rank=10", "--size", "qk_rope_head_dim=8"]
    result = CliRunner().invoke(cli.main, [*arguments, *sizes])
    assert result.exit_code == 0, result.output
    assert "512 -> 144" in result.output
    result = CliRunner().invoke(cli.main, ["evaluate", "builtin-llama", str(tmp_path / "out"), str(short_text)])
    assert result.exit_code == 0, result.output
    assert "512 -> 144" in result.output
    assert "tokens per second" in result.output
    result = CliRunner().invoke(cli.main, [*arguments, "--keep", "0.5"])
    assert result.exit_code == 2
    assert "keep must be left out with layout 'mla'" in result.output


# ---------------------------------------------------------------------------------------------------------- refusals

REASONS = {
    "qwen2": "queries, keys or values have biases",
    "llama_biases": "an output bias",
    "llama_linear": "engines do not scale its rotary embeddings",
    "llama_3": "scaled other than linearly",
    "mistral": "a sliding window",
    "qwen3": "queries and keys are normalised",
    "gemma": "embeddings or logits are scaled",
    "mixtral": "a sliding window",
    "deepseek_v3": "latent vectors",
    "gptj": "adjacent columns",
    "gpt2_lm": "no rotary embeddings",
    "llama_base": "no causal language model",
}


@pytest.mark.parametrize("name", REASONS)
def test_models_that_it_cannot_hold_are_refused(
    name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    with refused(ArgumentError, "compress: layout 'mla' cannot hold this", REASONS[name], "use layout 'factored'"):
        compress(folders[name], tmp_path / "out", layout="mla", sizes=SIZES, calibrate=short_text)
    assert list(tmp_path.iterdir()) == [short_text]


def test_half_precision_without_range_is_refused(short_text: Path, tmp_path: Path) -> None:
    save_with_tokenizer(random_model("llama").half(), tmp_path / "in")
    with refused(ArgumentError, "layout 'mla' cannot hold", "float16", "bfloat16"):
        compress(tmp_path / "in", tmp_path / "out", layout="mla", sizes=SIZES, calibrate=short_text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0.5}, ("keep must be left out", "KV cache", "--size kv_lora_rank=N")),
        ({}, ("either keep or sizes", "got neither")),
        ({"sizes": {"kv_lora_rank": 8}}, ("must state kv_lora_rank and qk_rope_head_dim", "no qk_rope_head_dim")),
        ({"sizes": {"kv_lora_rank": 65, "qk_rope_head_dim": 8}}, ("kv_lora_rank", "between 1 and 64", "got 65")),
        ({"sizes": {"kv_lora_rank": 8, "qk_rope_head_dim": 18}}, ("between 1 and 16", "got 18")),
        ({"sizes": {"kv_lora_rank": 8, "qk_rope_head_dim": 7}}, ("qk_rope_head_dim must be even, got 7",)),
        ({"sizes": {"v_head_dim": 8}}, ("must be among kv_lora_rank, qk_rope_head_dim",)),
        ({"sizes": SIZES, "calibrate": None}, ("layout 'mla' needs a text", "--calibrate")),
        ({"sizes": SIZES, "store": "int8"}, ("store must be left out",)),
    ],
)
def test_options_that_do_not_belong_together(
    options: dict[str, Any], words: tuple[str, ...], short_text: Path, tmp_path: Path
) -> None:
    with refused(ArgumentError, "compress: ", *words):
        compress(builtin_path("llama"), tmp_path / "out", **{"layout": "mla", "calibrate": short_text} | options)
    assert list(tmp_path.iterdir()) == [short_text]


def test_different_eps_in_the_file_are_read(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    """The stream is scaled by the root of the ratio of eps, which the norms remove."""
    source = Path(shutil.copytree(folders["llama"], tmp_path / "in"))
    change_config(source, rms_norm_eps=1e-2)
    compress(source, tmp_path / "out", layout="mla", sizes=SIZES, calibrate=short_text)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    got, want = (outputs(own, inputs(model)) for own in (loaded(tmp_path / "out"), truncated(model, tmp_path / "out")))
    assert_close(got, want, np.float32, factor=84)


# ------------------------------------------------------------------------------------------------------- the factors


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_the_norm_of_the_latent_is_linear(size: float) -> None:
    down, norm = size * normal((24, 5), seed=0), normal((24,), seed=1)
    factors = linear_norm(down, norm)
    assert np.log2([factors.down, factors.weight]).tolist() == np.log2([factors.down, factors.weight]).round().tolist()
    for seed in range(5):
        u = normal((24,), seed=2 + seed)
        latent = (norm * u * np.sqrt(24) / np.linalg.norm(u)) @ down
        c = factors.down * latent
        normed = factors.weight * c / np.sqrt(np.mean(c**2) + EPS) * factors.up
        np.testing.assert_allclose(normed, latent, rtol=1.1e-8)


def _layer(kv_heads: int = 2) -> tuple[Projections, Sizes, KeyMoments]:
    sizes = Sizes(n_layers=1, n_heads=4, d_model=24, kv_heads=kv_heads, d_head=6, d_value=5)
    shapes = {"q": (24, 24), "k": (24, 6 * kv_heads), "v": (24, 5 * kv_heads), "o": (20, 24)}
    weights = {name: normal(shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    roots = [normal((40, n), seed=9 + n) for n in (24, 6 * kv_heads, 5 * kv_heads)]
    return Projections(weights, {}), sizes, KeyMoments(*(root.T @ root for root in roots))


def test_a_latent_of_full_rank_has_all_keys_and_values_at_distance_zero() -> None:
    projections, sizes, moments = _layer()
    groups = frequency_groups(np.array([1.0, 0.1, 0.01]), np.array([1.0, 0.02]))
    assert [group.tolist() for group in groups] == [[0], [1, 2]]
    factors = latent_factors(projections, sizes, moments, groups, rank=22)
    x, y = normal((7, 24), seed=5), normal((7, 24), seed=6)
    queries = np.einsum("td,dhi->hti", x, factors.query)
    up = np.einsum("td,dr,rhi->hti", y, factors.down[:, :22], factors.up)
    shared = np.broadcast_to(y @ factors.down[:, 22:], (4, 7, 4))
    scores = queries @ np.concatenate([up[..., :6], shared], -1).transpose(0, 2, 1)
    q, k, v = (own @ projections.weights[name] for own, name in ((x, "q"), (y, "k"), (y, "v")))
    for head in range(4):
        own = slice(6 * (head // 2), 6 * (head // 2) + 6)
        np.testing.assert_allclose(scores[head], q[:, 6 * head : 6 * head + 6] @ k[:, own].T, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(up[head, :, 6:], v[:, 5 * (head // 2) : 5 * (head // 2) + 5], rtol=1e-9, atol=1e-9)


def test_the_shared_key_has_the_smallest_error() -> None:
    """Beside other combinations of the planes of a frequency in all heads."""
    projections, sizes, moments = _layer()
    factors = latent_factors(projections, sizes, moments, [np.array([f]) for f in range(3)], rank=3)
    keys = projections.weights["k"].reshape(24, 2, 6)
    planes, slopes = keys[..., :3] + 1j * keys[..., 3:], moments.keys.reshape(2, 2, 3, 2, 2, 3)
    for f in range(3):
        own, p = planes[:, :, f], slopes[:, :, f, :, :, f]  # heads, real or imaginary
        mixed = p[:, 0, :, 0] + p[:, 1, :, 1] + 1j * (p[:, 0, :, 1] - p[:, 1, :, 0])  # E[conj(p) p^T]
        kept = factors.down[:, 3 + 2 * f] + 1j * factors.down[:, 4 + 2 * f]
        a = np.linalg.lstsq(own, kept, rcond=None)[0]
        assert np.linalg.norm(own @ a - kept) < 1e-9 * np.linalg.norm(kept)
        errors = [_least_error(own, moments.inputs, mixed, b) for b in (a, *(_complex(2, seed) for seed in range(9)))]
        assert errors[0] <= min(errors[1:]) * (1 + 1e-9)


def _complex(n: int, seed: int) -> np.ndarray:
    return normal((n,), seed=seed) + 1j * normal((n,), seed=99 + seed)


def _least_error(planes: np.ndarray, inputs: np.ndarray, slopes: np.ndarray, a: np.ndarray) -> float:
    """The error with the key k a and the row b that suits it best, which regresses k on k a."""
    k = planes.conj().T @ inputs @ planes
    b = (a.conj() @ k) / (a.conj() @ k @ a)
    rest = np.eye(len(a)) - np.outer(a, b)
    return float(np.trace(k @ rest @ slopes @ rest.conj().T).real)
