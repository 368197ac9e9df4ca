"""The layout `narrow`: what is written, loaded by transformers alone, beside the zero-padded original."""

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
from compressed_folders import PAGE as WRITE_PAGE  # noqa: E402
from compressed_folders import by_options  # noqa: E402
from padded_models import padded, planes_of, stated  # noqa: E402
from slow_cases import mostly_slow  # noqa: E402
from tnlib_adapters import Budget, Run, builtin_path, cli, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.evaluation.evaluate import evaluate  # noqa: E402
from tnlib_adapters.compression.report.html import write_page  # noqa: E402
from tnlib_adapters.reference.model import run  # noqa: E402
from transformers_models import (  # noqa: E402
    inputs,
    outputs,
    random_model,
    save_with_tokenizer,
)

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError  # noqa: E402

Saved = Callable[[str], tuple[Any, Path]]

LICENSE = Path(__file__).parents[3] / "LICENSE"
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


@pytest.mark.parametrize("name", mostly_slow(NARROWER, ["llama", "gemma2"]))
def test_narrow_heads_compute_what_the_truncation_does(
    name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    source, out = folders[name], tmp_path / "out"
    sizes = {"head_dim": 4, "intermediate_size": 29}
    report = compress(source, out, Budget(sizes=sizes), calibration=short_text, layout="narrow")
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
    report = compress(source, out, Budget(sizes={"intermediate_size": 23}), calibration=short_text, layout="narrow")
    same_as_padded(random_model(name), source, out)
    assert report.what == "mlp"
    old, new = stated(source), stated(out)
    assert {key for key in old if old[key] != new.get(key)} == {"intermediate_size"}


@pytest.mark.slow
def test_blocks_run_in_half_precision(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    source, sizes = folders["llama"], {"head_dim": 4, "intermediate_size": 29}
    report = compress(
        source, tmp_path / "out", **by_options(sizes=sizes, calibrate=short_text, layout="narrow", dtype="bfloat16")
    )
    assert report.measured is not None
    same_as_padded(random_model("llama"), source, tmp_path / "out")


def test_the_planes_are_those_that_matter(tmp_path: Path, short_text: Path) -> None:
    """Queries that do not use the fastest plane: the window starts at the next, and positions are divided."""
    source = save_with_tokenizer(random_model("mistral_whole"), tmp_path / "in")

    def still(tensors: dict[str, np.ndarray]) -> None:
        for name, a in tensors.items():
            if "q_proj" in name:
                a.reshape(4, 2, 5, -1)[:, :, 0] = 0

    change_tensors(source, still)
    compress(source, tmp_path / "out", Budget(sizes={"head_dim": 8}), calibration=short_text, layout="narrow")
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
    report = compress(source, tmp_path / "out", Budget(keep=0.6), calibration=short_text, layout="narrow")
    assert 0.59 <= report.kept <= 0.6
    assert stated(tmp_path / "out")["head_dim"] == 8


def test_a_config_of_transformers_4_keeps_its_keys(saved: Saved, short_text: Path, tmp_path: Path) -> None:
    source = save_with_tokenizer(saved("llama")[0], tmp_path / "in")
    change_config(source, rope_parameters=..., rope_theta=500.0, rope_scaling=None, dtype=..., torch_dtype="float32")
    compress(source, tmp_path / "out", Budget(sizes={"head_dim": 4}), calibration=short_text, layout="narrow")
    assert "rope_parameters" not in stated(tmp_path / "out")
    assert stated(tmp_path / "out")["torch_dtype"] == "float32"
    model = type(saved("llama")[0]).from_pretrained(source, attn_implementation="eager").eval()
    same_as_padded(model, source, tmp_path / "out")


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
            compress(folders[name], tmp_path / "out", **by_options(layout="narrow", calibrate=short_text, **options))


@pytest.mark.parametrize("name", ["gpt2_lm", "bloom", "opt", "mixtral", "deepseek_v3"])
def test_layers_that_cannot_be_narrower_are_refused(
    name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    with refused(ArgumentError, "compress: ", "layout 'narrow'"):
        compress(
            folders[name],
            tmp_path / "out",
            **by_options(sizes={"intermediate_size": 9}, calibrate=short_text, layout="narrow"),
        )


# --------------------------------------------------------------------------------------------- options and folders


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "narrow"}, ("either keep or sizes", "got neither", "head_dim")),
        ({"layout": "narrow", "keep": 0.5, "sizes": {"head_dim": 8}}, ("either keep or sizes", "got both")),
        ({"layout": "narrow", "sizes": {"v_head_dim": 8}}, ("sizes must be one of head_dim", "'v_head_dim'")),
        ({"layout": "narrow", "sizes": {"head_dim": 17}, "calibrate": LICENSE}, ("between 1 and 16", "got 17")),
        ({"layout": "narrow", "sizes": {"head_dim": 0}, "calibrate": LICENSE}, ("at least 1", "got 0")),
        ({"layout": "narrow", "keep": 1.5, "calibrate": LICENSE}, ("keep must lie in (0, 1]",)),
        ({"layout": "narrow", "keep": 0.5, "store": "int8"}, ("store must be left out", "'narrow'")),
        ({"layout": "narrow", "keep": 0.5, "method": "matrix"}, ("method must be left out",)),
        ({"layout": "narrow", "bits": 4}, ("bits must be left out",)),
        ({"layout": "narrow", "keep": 0.5}, ("layout 'narrow' needs a text", "--calibrate")),
        ({"layout": "factored", "keep": 0.5, "sizes": {"head_dim": 8}}, ("sizes must come with layout",)),
        ({"layout": "smaller", "keep": 0.5}, ("layout must be one of",)),
    ],
)
def test_options_that_do_not_belong_together(options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    with refused(ArgumentError, *words):
        compress(builtin_path("llama"), tmp_path / "out", **by_options(**options))
    assert list(tmp_path.iterdir()) == []


def test_odd_heads_and_other_types_are_refused(short_text: Path, tmp_path: Path) -> None:
    with refused(ArgumentError, "head_dim must be even, got 7"):
        compress(
            builtin_path("llama"),
            tmp_path / "out",
            **by_options(sizes={"head_dim": 7}, calibrate=short_text, layout="narrow"),
        )
    with refused(ArgumentTypeError, "head_dim in sizes must be an integer, got 8.0"):
        compress(builtin_path("llama"), tmp_path / "out", Budget(sizes={"head_dim": 8.0}), layout="narrow")  # type: ignore[dict-item]


def test_damaged_weights_leave_nothing(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(folders["llama"], tmp_path / "in"))
    change_tensors(source, lambda tensors: tensors["model.norm.weight"].__setitem__(0, np.nan))
    with refused(FileFormatError, "model.norm.weight", "nan"):
        compress(source, tmp_path / "out", Budget(keep=0.5), calibration=short_text, layout="narrow")
    assert {file.name for file in tmp_path.iterdir()} == {"in", short_text.name}


def test_a_folder_is_replaced_as_a_whole(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    source, out = folders["llama"], tmp_path / "out"
    compress(source, out, Budget(sizes={"head_dim": 2}), calibration=short_text, layout="narrow")
    before = digest(out)
    with refused(ArgumentError, "OUT must not exist or be empty", "--force"):
        compress(source, out, Budget(sizes={"head_dim": 4}), calibration=short_text, layout="narrow")
    assert digest(out) == before
    compress(source, out, Budget(sizes={"head_dim": 4}), calibration=short_text, layout="narrow", run=Run(force=True))
    assert stated(out)["head_dim"] == 4
    assert {file.name for file in tmp_path.iterdir()} == {"out", short_text.name}


def test_shards_and_half_precision_stay(short_text: Path, tmp_path: Path) -> None:
    source = save_with_tokenizer(random_model("llama_tied").to(torch.bfloat16), tmp_path / "in")
    (source / "model.safetensors").unlink()
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(source), dtype=torch.bfloat16
    ).save_pretrained(source, max_shard_size="10KB")
    compress(source, tmp_path / "out", Budget(sizes={"head_dim": 4}), calibration=short_text, layout="narrow")
    tensors = read_tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    files = [{file.name for file in folder.glob("*.safetensors")} for folder in (source, tmp_path / "out")]
    assert files[1] == files[0]
    assert len(files[0]) > 2
    assert loaded(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.slow
def test_the_command_line(short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WRITE_PAGE, write_page)  # with pictures
    out = tmp_path / "out"
    options = ["--layout", "narrow", "--calibrate", str(short_text), "--size"]
    arguments = ["compress", "builtin-llama", str(out), *options, "head_dim=8"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"bytes of the KV cache per token +512 -> 256\n", result.output)
    assert "transformers.AutoModelForCausalLM" in result.output
    assert "<svg" in (out / "tnlib_report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compress", "builtin-llama", "out", "--layout", "narrow", "--size", "head_dim:4"], "is not NAME=N"),
        (["plan", "builtin-llama", "--layout", "narrow", "--keep", "0.5"], "got 'narrow'"),
    ],
)
def test_wrong_sizes_on_the_command_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.slow
def test_the_built_in_llama(tmp_path: Path) -> None:
    """A licence as text: half of the heads, and generation."""
    source = builtin_path("llama")
    compress(source, tmp_path / "out", Budget(sizes={"head_dim": 8}), calibration=LICENSE, layout="narrow")
    found = evaluate(source, tmp_path / "out", LICENSE)
    assert found.divergence is not None
    assert found.divergence < 0.5
    assert found.cache_bytes == (512, 256)
    kind = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **kind).eval()
    x = torch.from_numpy(inputs(model)[:1])
    options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    pair = loaded(tmp_path / "out", dtype=torch.float32), padded(model, source, tmp_path / "out")
    assert torch.equal(*(m.generate(x, attention_mask=torch.ones_like(x), **options) for m in pair))
