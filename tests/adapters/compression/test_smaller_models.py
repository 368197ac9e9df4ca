"""Layouts that are smaller models: what is written, loaded by transformers alone, beside the zero-padded original."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import change_config, change_tensors
from compressed_folders import digest, read_tensors
from oracles import assert_close, refused

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402
from padded_models import padded, planes_of, stated  # noqa: E402
from quick_compressions import PAGE as WRITE_PAGE  # noqa: E402
from running_models import save_with_tokenizer  # noqa: E402
from slow_cases import mostly_slow  # noqa: E402
from tnlib_adapters import builtin_path, cli, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.evaluation.evaluate import evaluate  # noqa: E402
from tnlib_adapters.compression.report.html import write_page  # noqa: E402
from tnlib_adapters.reference.model import run  # noqa: E402
from transformers_models import MODELS, inputs, outputs, random_model  # noqa: E402

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError  # noqa: E402

Saved = Callable[[str], tuple[Any, Path]]

IN_MIMO = ("llama", "llama_tied", "mistral_whole", "mimo_v2_flash", "mimo_v2_flash_biases", "phi3", "qwen2")
NARROWER = ("llama", "llama_biases", "llama_linear", "llama_tied", "mistral", "gemma", "gemma2")
FEWER_NEURONS = ("bert_masked", "gpt_neox", "llama_yarn", "phi", "phi3", "qwen3", "starcoder2")


pytestmark = pytest.mark.usefixtures("few_layout_steps", "without_pictures")


def loaded(folder: Path, **options: Any) -> Any:
    """The model as transformers loads it, with a place for every tensor and a tensor for every place."""
    classes = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
    kind = classes["MaskedLM" in stated(folder)["architectures"][0]]
    model, info = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model.eval()


def same_as_padded(model: Any, source: Path, out: Path) -> Any:
    """The written model, whose logits are those of the zero-padded original, here and in float64."""
    written, x = loaded(out), inputs(model)
    got, want = outputs(written, x), outputs(padded(model, source, out), x)
    assert_close(got, want, np.float32, factor=84)  # 1e-5
    assert np.abs(got - outputs(model, x)).max() > 1e-3 * np.abs(got).max()
    if written.config.model_type != "bert":
        assert_close(got, run(open_checkpoint(out), x).logits, np.float32, factor=84)
    return written


# ------------------------------------------------------------------------------------------------------------ mimo


@pytest.mark.parametrize("name", mostly_slow(IN_MIMO, ["llama", "mimo_v2_flash_biases"]))
def test_narrow_values_compute_what_the_truncation_does(name: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    before = open_checkpoint(source).sizes
    report = compress(source, tmp_path / "out", layout="mimo", sizes={"v_head_dim": 3})
    written = same_as_padded(model, source, tmp_path / "out")
    assert type(written).__name__ == "MiMoV2FlashForCausalLM"
    assert stated(tmp_path / "out")["v_head_dim"] == 3
    assert {info.dtype for info in open_checkpoint(tmp_path / "out").folder.tensors.values()} == {"F32"}
    assert report.kept == pytest.approx(3 / before.d_value)
    per_width = 4 * before.n_layers * before.kv_heads
    assert report.cache_bytes == {
        "before": per_width * (before.d_head + before.d_value),
        "after": per_width * (before.d_head + 3),
    }
    assert all(layer.qk_error < 1e-6 < layer.ov_error < 1 for layer in report.layers)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_generation_is_that_of_the_truncation(name: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    compress(source, tmp_path / "out", layout="mimo", keep=0.5)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    x = torch.from_numpy(inputs(model)[:1])
    generated = [
        m.generate(x, attention_mask=torch.ones_like(x), **options)
        for m in (loaded(tmp_path / "out"), padded(model, source, tmp_path / "out"))
    ]
    assert torch.equal(*generated)
    assert generated[0].shape[1] == x.shape[1] + 8


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_values_of_full_width_change_nothing(name: str, saved: Saved, tmp_path: Path) -> None:
    model, source = saved(name)
    report = compress(source, tmp_path / "out", layout="mimo", keep=1.0)
    assert report.kept == 1.0
    assert_close(outputs(loaded(tmp_path / "out"), inputs(model)), outputs(model, inputs(model)), np.float32, 84)


@pytest.mark.parametrize("name", mostly_slow(["llama", "mistral_whole", "mimo_v2_flash_biases"], ["llama"]))
def test_a_text_chooses_better_values(name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    source, errors = folders[name], []
    for out, options in (("plain", {}), ("calibrated", {"calibrate": short_text})):
        report = compress(source, tmp_path / out, layout="mimo", keep=0.5, **options)
        evaluation = evaluate(source, tmp_path / out, short_text)
        errors.append(evaluation.divergence)
        assert evaluation.cache_bytes == (report.cache_bytes["before"], report.cache_bytes["after"])
        assert evaluation.tokens_per_second is not None
        assert min(evaluation.tokens_per_second) > 0
    assert errors[1] < 0.7 * errors[0]
    assert report.measure == "divergence (nats a token)"
    assert report.measured is not None
    assert report.calibration["held_out"] > 0
    same_as_padded(random_model(name), source, tmp_path / "calibrated")
    assert "MiMoV2" not in (tmp_path / "calibrated" / "README.md").read_text()
    assert {file.name for file in source.iterdir()} <= {file.name for file in (tmp_path / "calibrated").iterdir()}


# Keys that the model files of engines read where no layer has a window or experts:
# vLLM 6b7667c, vllm/model_executor/models/mimo_v2.py; SGLang dd6f32b, python/sglang/srt/models/mimo_v2_flash.py
READ_BY_ENGINES = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "attention_bias": True,
    "attention_value_scale": None,
    "add_full_attention_sink_bias": False,
    "head_dim": 6,
    "hidden_act": "silu",
    "hidden_size": 24,
    "hybrid_layer_pattern": [0, 0],
    "intermediate_size": 40,
    "layernorm_epsilon": 1e-6,
    "max_position_embeddings": 32,
    "moe_layer_freq": [0, 0],
    "n_routed_experts": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "v_head_dim": 3,
    "vocab_size": 50,
}


def test_the_keys_of_engines_are_stated(saved: Saved, tmp_path: Path) -> None:
    compress(saved("qwen2")[1], tmp_path / "out", layout="mimo", sizes={"v_head_dim": 3})
    config = stated(tmp_path / "out")
    assert {key: config.get(key, "missing") for key in READ_BY_ENGINES} == READ_BY_ENGINES
    assert config["sliding_window"] == config["max_position_embeddings"]


REASONS = {
    "llama_base": "no causal language model",
    "llama_biases": "an output bias",
    "llama_linear": "engines do not scale its rotary embeddings",
    "llama_dynamic": "scaled other than linearly",
    "llama_yarn": "scaled other than linearly",
    "llama_3": "scaled other than linearly",
    "mistral": "a sliding window",
    "qwen2_window": "a sliding window",
    "phi3_window": "a sliding window",
    "phi3_longrope": "scaled other than linearly",
    "mixtral": "a sliding window",
    "qwen3": "queries and keys are normalised",
    "gemma": "embeddings or logits are scaled",
    "gemma2": "a sliding window",
    "starcoder2_untied": "no gate with SiLU",
    "deepseek_v3": "latent vectors",
    "gpt_neox_sequential": "feed-forward layers have biases",
    "gptj": "adjacent columns",
    "phi": "an output bias",
    "falcon": "the same stream",
    "bloom": "no rotary embeddings",
    "gpt2_lm": "no rotary embeddings",
    "t5": "no causal language model",
    "vit": "no causal language model",
}


@pytest.mark.parametrize("name", REASONS)
def test_models_that_mimo_cannot_hold_are_refused(name: str, saved: Saved, tmp_path: Path) -> None:
    with refused(ArgumentError, "compress: layout 'mimo' cannot hold this", REASONS[name], "use layout 'factored'"):
        compress(saved(name)[1], tmp_path / "out", layout="mimo", keep=0.5)
    assert list(tmp_path.iterdir()) == []


def test_every_other_model_is_refused(saved: Saved, tmp_path: Path) -> None:
    for name in sorted({*MODELS} - {*IN_MIMO, *REASONS}):
        with refused(ArgumentError, "compress:", "cannot hold this"):
            compress(saved(name)[1], tmp_path / "out", layout="mimo", keep=0.5)


def test_windows_as_long_as_the_context_are_none(tmp_path: Path) -> None:
    model = random_model("mistral")
    model.config.sliding_window = 32
    model.save_pretrained(tmp_path / "in")
    compress(tmp_path / "in", tmp_path / "out", layout="mimo", keep=0.5)
    same_as_padded(model, tmp_path / "in", tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------- narrow


@pytest.mark.parametrize("name", mostly_slow(NARROWER, ["llama", "gemma2"]))
def test_narrow_heads_compute_what_the_truncation_does(
    name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    source, out = folders[name], tmp_path / "out"
    sizes = {"head_dim": 4, "intermediate_size": 29}
    report = compress(source, out, layout="narrow", sizes=sizes, calibrate=short_text)
    written = same_as_padded(random_model(name), source, out)
    before, after = stated(source), stated(out)
    assert (after["head_dim"], after["intermediate_size"]) == (4, 29)
    assert (after["model_type"], after["architectures"]) == (before["model_type"], before["architectures"])
    assert set(before.keys() ^ after.keys()) <= {"head_dim"}
    assert type(written) is type(random_model(name))
    assert report.n_after < report.n_before
    assert report.cache_bytes["after"] * open_checkpoint(source).sizes.d_head == report.cache_bytes["before"] * 4


@pytest.mark.parametrize("name", mostly_slow(FEWER_NEURONS, ["bert_masked", "qwen3"]))
def test_fewer_neurons_compute_what_the_truncation_does(
    name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    source, out = folders[name], tmp_path / "out"
    report = compress(source, out, layout="narrow", sizes={"intermediate_size": 23}, calibrate=short_text)
    same_as_padded(random_model(name), source, out)
    assert report.what == "mlp"
    old, new = stated(source), stated(out)
    assert {key for key in old if old[key] != new.get(key)} == {"intermediate_size"}


@pytest.mark.slow
def test_blocks_run_in_half_precision(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    source = folders["llama"]
    for layout, sizes in (("mimo", {"v_head_dim": 3}), ("narrow", {"head_dim": 4, "intermediate_size": 29})):
        report = compress(source, tmp_path / layout, layout=layout, sizes=sizes, calibrate=short_text, dtype="bfloat16")
        assert report.measured is not None
        same_as_padded(random_model("llama"), source, tmp_path / layout)


def test_the_planes_are_those_that_matter(tmp_path: Path, short_text: Path) -> None:
    """Queries that do not use the fastest plane: the window starts at the next, and positions are divided."""
    source = save_with_tokenizer(random_model("mistral_whole"), tmp_path / "in")

    def still(tensors: dict[str, np.ndarray]) -> None:
        for name, a in tensors.items():
            if "q_proj" in name:
                a.reshape(4, 2, 5, -1)[:, :, 0] = 0

    change_tensors(source, still)
    compress(source, tmp_path / "out", layout="narrow", sizes={"head_dim": 8}, calibrate=short_text)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    planes = planes_of(before, after)
    assert (planes.start, planes.step, planes.count) == (1, 1, 4)
    rope = stated(tmp_path / "out")["rope_parameters"]
    assert rope["rope_type"] == "linear"
    assert rope["factor"] == pytest.approx(1e4**0.2)
    assert rope["rope_theta"] == pytest.approx(1e4**0.8)
    model = type(random_model("mistral_whole")).from_pretrained(source, attn_implementation="eager").eval()
    same_as_padded(model, source, tmp_path / "out")


def test_a_fraction_is_met_within_a_percent(tmp_path: Path, short_text: Path) -> None:
    sizes = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    source = save_with_tokenizer(transformers.LlamaForCausalLM(sizes), tmp_path / "in")
    report = compress(source, tmp_path / "out", layout="narrow", keep=0.6, calibrate=short_text)
    assert 0.59 <= report.kept <= 0.6
    assert stated(tmp_path / "out")["head_dim"] == 8


def test_a_config_of_transformers_4_keeps_its_keys(saved: Saved, short_text: Path, tmp_path: Path) -> None:
    source = save_with_tokenizer(saved("llama")[0], tmp_path / "in")
    change_config(source, rope_parameters=..., rope_theta=500.0, rope_scaling=None, dtype=..., torch_dtype="float32")
    compress(source, tmp_path / "narrow", layout="narrow", sizes={"head_dim": 4}, calibrate=short_text)
    compress(source, tmp_path / "mimo", layout="mimo", keep=0.5)
    narrow, mimo = stated(tmp_path / "narrow"), stated(tmp_path / "mimo")
    assert "rope_parameters" not in narrow
    assert narrow["torch_dtype"] == mimo["torch_dtype"] == "float32"
    assert mimo["rope_parameters"]["full_attention"]["rope_theta"] == mimo["rope_theta"] == 500.0
    model = type(saved("llama")[0]).from_pretrained(source, attn_implementation="eager").eval()
    for out in ("narrow", "mimo"):
        same_as_padded(model, source, tmp_path / out)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3", "queries and keys are normalised"),
        ("phi", "some columns of its heads are not rotated"),
        ("phi3", "its config.json has no head_dim"),
        ("llama_yarn", "scaled other than linearly"),
        ("bert", "no rotary embeddings"),
    ],
)
def test_heads_that_cannot_be_narrower_are_refused(
    name: str, words: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    for options in ({"keep": 0.5}, {"sizes": {"head_dim": 4}}):
        with refused(ArgumentError, "compress: layout 'narrow'", words, "--size intermediate_size"):
            compress(folders[name], tmp_path / "out", layout="narrow", calibrate=short_text, **options)


@pytest.mark.parametrize("name", ["gpt2_lm", "bloom", "opt", "mixtral", "deepseek_v3"])
def test_layers_that_cannot_be_narrower_are_refused(
    name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    with refused(ArgumentError, "compress: ", "layout 'narrow'"):
        compress(folders[name], tmp_path / "out", layout="narrow", sizes={"intermediate_size": 9}, calibrate=short_text)


# --------------------------------------------------------------------------------------------- options and folders


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "mimo"}, ("either keep or sizes", "got neither", "v_head_dim")),
        ({"layout": "mimo", "keep": 0.5, "sizes": {"v_head_dim": 8}}, ("either keep or sizes", "got both")),
        ({"layout": "mimo", "sizes": {"head_dim": 8}}, ("must be among v_head_dim", "'head_dim'")),
        ({"layout": "mimo", "sizes": {"v_head_dim": 17}}, ("between 1 and 16", "got 17")),
        ({"layout": "mimo", "sizes": {"v_head_dim": 0}}, ("between 1 and 16", "got 0")),
        ({"layout": "mimo", "keep": 0.01}, ("between 1 and 16", "got 0")),
        ({"layout": "mimo", "keep": 1.5}, ("keep must lie in (0, 1]",)),
        ({"layout": "mimo", "keep": 0.5, "store": "int8"}, ("store must be left out", "'mimo'")),
        ({"layout": "mimo", "keep": 0.5, "method": "matrix"}, ("method must be left out",)),
        ({"layout": "mimo", "bits": 4}, ("bits must be left out",)),
        ({"layout": "narrow", "keep": 0.5}, ("layout 'narrow' needs a text", "--calibrate")),
        ({"layout": "factored", "keep": 0.5, "sizes": {"v_head_dim": 8}}, ("sizes must come with layout",)),
        ({"layout": "smaller", "keep": 0.5}, ("layout must be one of",)),
    ],
)
def test_options_that_do_not_belong_together(options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    with refused(ArgumentError, "compress: ", *words):
        compress(builtin_path("llama"), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_odd_heads_and_other_types_are_refused(short_text: Path, tmp_path: Path) -> None:
    with refused(ArgumentError, "head_dim must be even, got 7"):
        compress(builtin_path("llama"), tmp_path / "out", layout="narrow", sizes={"head_dim": 7}, calibrate=short_text)
    with refused(ArgumentTypeError, "v_head_dim in sizes must be an integer, got 8.0"):
        compress(builtin_path("llama"), tmp_path / "out", layout="mimo", sizes={"v_head_dim": 8.0})  # type: ignore[dict-item]


def test_damaged_weights_leave_nothing(saved: Saved, tmp_path: Path) -> None:
    source = Path(shutil.copytree(saved("llama")[1], tmp_path / "in"))
    change_tensors(source, lambda tensors: tensors["model.norm.weight"].__setitem__(0, np.nan))
    with refused(FileFormatError, "model.norm.weight", "nan"):
        compress(source, tmp_path / "out", layout="mimo", keep=0.5)
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_a_folder_is_replaced_as_a_whole(saved: Saved, tmp_path: Path) -> None:
    source, out = saved("llama")[1], tmp_path / "out"
    compress(source, out, layout="mimo", keep=0.5)
    before = digest(out)
    with refused(ArgumentError, "OUT must not exist or be empty", "--force"):
        compress(source, out, layout="mimo", keep=0.8)
    assert digest(out) == before
    compress(source, out, layout="mimo", keep=0.8, force=True)
    assert stated(out)["v_head_dim"] == 4
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_shards_and_half_precision_stay(saved: Saved, tmp_path: Path) -> None:
    model, source = random_model("llama_tied").to(torch.bfloat16), tmp_path / "in"
    model.save_pretrained(source, max_shard_size="10KB")
    compress(source, tmp_path / "out", layout="mimo", keep=0.5)
    tensors = read_tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    files = [{file.name for file in folder.glob("*.safetensors")} for folder in (source, tmp_path / "out")]
    assert files[1] == files[0] > {"model-00001-of-00003.safetensors"}
    assert loaded(tmp_path / "out").dtype == torch.bfloat16
    np.testing.assert_array_equal(tensors["lm_head.weight"].values, tensors["model.embed_tokens.weight"].values)


def test_the_command_line(short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WRITE_PAGE, write_page)  # with pictures
    out = tmp_path / "out"
    arguments = ["compress", "builtin-llama", str(out), "--layout", "mimo", "--size", "v_head_dim=4"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"bytes of the KV cache per token +512 -> 320\n", result.output)
    assert "transformers.AutoModelForCausalLM" in result.output
    assert "<svg" in (out / "tnlib_report.html").read_text(encoding="utf-8")
    result = CliRunner().invoke(cli.main, [*arguments[:-1], "v_head_dim:4", "--force"])
    assert result.exit_code == 2
    assert "is not NAME=N" in result.output
    result = CliRunner().invoke(cli.main, ["plan", "builtin-llama", "--layout", "mimo", "--keep", "0.5"])
    assert result.exit_code == 2
    assert "the cost of layout 'mimo' is not estimated" in result.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types of a mimo_v2_flash must be"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types of a mimo_v2_flash must be 'dense' in every layer"),
        ({"mlp_layer_types": ...}, "got None"),
        ({"layer_types": "full_attention"}, "in every layer"),
        ({"layer_types": ["full_attention"]}, "must list the types of 2 layers"),
        ({"attention_value_scale": 0.707}, "attention_value_scale of a mimo_v2_flash must be None"),
        ({"v_head_dim": 4}, "must have shape"),
        ({"v_head_dim": ...}, "v_head_dim"),
    ],
)
def test_other_models_of_the_container_are_refused(
    changes: dict[str, Any], words: str, saved: Saved, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved("mimo_v2_flash")[1], tmp_path / "in"))
    change_config(folder, **changes)
    with refused(FileFormatError, "open_checkpoint", words):
        open_checkpoint(folder)


@pytest.mark.slow
def test_the_built_in_llama(tmp_path: Path) -> None:
    """A licence as text: half of the values, then half of the heads, beside the truncation by SVD."""
    text, source = tmp_path / "text.txt", builtin_path("llama")
    shutil.copy(Path(__file__).parents[3] / "LICENSE", text)
    compress(source, tmp_path / "plain", layout="mimo", keep=0.5)
    compress(source, tmp_path / "mimo", layout="mimo", keep=0.5, calibrate=text)
    compress(source, tmp_path / "narrow", layout="narrow", sizes={"head_dim": 8}, calibrate=text)
    plain, mimo, narrow = (evaluate(source, tmp_path / out, text) for out in ("plain", "mimo", "narrow"))
    assert mimo.divergence < 0.5 * plain.divergence
    assert narrow.divergence < plain.divergence
    assert mimo.cache_bytes == (512, 384)
    assert narrow.cache_bytes == (512, 256)

    kind = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **kind).eval()
    x = torch.from_numpy(inputs(model)[:1])
    options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for out in ("mimo", "narrow"):
        pair = loaded(tmp_path / out, dtype=torch.float32), padded(model, source, tmp_path / out)
        generated = [m.generate(x, attention_mask=torch.ones_like(x), **options) for m in pair]
        assert torch.equal(*generated)
