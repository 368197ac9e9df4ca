"""ONNX folders of encoders, run by onnxruntime beside transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import refused
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from command_line import run_command  # noqa: E402
from compressed_folders import by_options  # noqa: E402
from tnlib_adapters import Budget, compress  # noqa: E402
from tnlib_adapters.transformers_plugin.onnx_export import export_onnx  # noqa: E402

from tnlib import ArgumentError  # noqa: E402

Saved = Callable[[str], tuple[Any, Path]]
ENCODERS = ("bert", "bert_masked", "roberta", "t5_encoder", "t5_encoder_gated")  # of text
ON_CPU = {"providers": ["CPUExecutionProvider"]}


def differ(model: Any, graph: Path, n_texts: int, n_tokens: int) -> float:
    """The largest difference of the hidden states of tokens, relative to the largest hidden state."""
    session, generator = onnxruntime.InferenceSession(graph, **ON_CPU), torch.Generator().manual_seed(n_tokens)
    names = [put_in.name for put_in in session.get_inputs()]
    mask = torch.ones(n_texts, n_tokens, dtype=torch.long)
    mask[1:, n_tokens // 2 + 1 :] = 0
    made = {
        "input_ids": torch.randint(2, model.config.vocab_size, (n_texts, n_tokens), generator=generator),
        "attention_mask": mask,
        "token_type_ids": torch.arange(n_tokens).remainder(2).repeat(n_texts, 1),
    }
    given = {name: made[name] for name in names}
    with torch.no_grad():
        wanted = model(**given).last_hidden_state.numpy()
    (found,) = session.run(None, {name: value.numpy() for name, value in given.items()})
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted)[mask.numpy() > 0].max() / np.abs(wanted).max())


def load(folder: Path, name: str) -> Any:
    kind = transformers.AutoModelForTextEncoding if "t5" in name else transformers.AutoModel
    return kind.from_pretrained(folder).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_of_text_gives_the_hidden_states_of_transformers(name: str, saved: Saved, tmp_path: Path) -> None:
    _, folder = saved(name)
    graph, model = export_onnx(folder, tmp_path / "out"), load(folder, name)
    assert max(differ(model, graph, *sizes) for sizes in ((1, 1), (1, 6), (3, 9))) <= 1e-5


@pytest.mark.slow
def test_images(saved: Saved, tmp_path: Path) -> None:
    _, folder = saved("vit")
    session = onnxruntime.InferenceSession(export_onnx(folder, tmp_path / "out"), **ON_CPU)
    model = load(folder, "vit")
    for count in (1, 3):
        images = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            wanted = model(images).last_hidden_state.numpy()
        (found,) = session.run(None, {"pixel_values": images.numpy()})
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


BY_MATRIX = {"method": "matrix", "what": "all", "keep": 0.6}
KINDS = [BY_MATRIX, BY_MATRIX | {"store": "int8"}, {"method": "tucker", "keep": 0.6}, {"method": "heads", "keep": 0.6}]


@pytest.mark.parametrize("options", mostly_slow(KINDS, []), ids=str)
def test_compressed_folders(options: dict[str, Any], saved: Saved, tmp_path: Path) -> None:
    compress(saved("bert")[1], tmp_path / "small", **by_options(**options))
    result = run_command("export-onnx", tmp_path / "small", tmp_path / "out")
    graph = tmp_path / "out" / "onnx" / "model.onnx"
    assert result.stdout.splitlines() == [str(graph)]
    model = load(tmp_path / "small", "bert")
    assert max(differ(model, graph, *sizes) for sizes in ((1, 5), (2, 9))) <= 1e-5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "out" / "tnlib_report.json").exists()


@pytest.mark.slow
def test_calibrated_factors_are_two_products(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    folder = folders["bert"]
    compress(folder, tmp_path / "small", Budget(keep=0.5), calibration=text, what="all")
    graph = export_onnx(tmp_path / "small", tmp_path / "out")
    assert differ(load(tmp_path / "small", "bert"), graph, 2, 9) <= 1e-5
    kept = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert kept <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert b"tnlib" not in (tmp_path / "out" / "README.md").read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in graph.read_bytes()  # traces of the exporting machine


def test_models_that_are_no_encoder_are_refused(saved: Saved, tmp_path: Path) -> None:
    for name, words in (("gpt2", "whose attention is causal"), ("t5", "an encoder and a decoder")):
        with refused(ArgumentError, "export_onnx", "folder must hold an encoder", words):
            export_onnx(saved(name)[1], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_folder_appears_whole_or_not_at_all(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    _, folder = saved("bert")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with refused(ArgumentError, "export_onnx: OUT must be a new or an empty folder", "--force"):
        export_onnx(folder, out)
    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(OSError, match="no space"):
        export_onnx(folder, out, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_the_command_refuses_in_one_sentence(saved: Saved, tmp_path: Path) -> None:
    result = run_command("export-onnx", saved("gpt2")[1], tmp_path / "other", status=2)
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_sentences_of_a_trained_model(minilm_path: Path, tmp_path: Path) -> None:
    """What sentence-transformers computes with backend="onnx": the mean of the hidden states of the tokens."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["A cat sleeps.", "The committee adjourned until the following Tuesday morning.", "Rain."]
    compress(minilm_path, tmp_path / "small", Budget(keep=0.5), what="all", method="matrix")
    session = onnxruntime.InferenceSession(export_onnx(tmp_path / "small", tmp_path / "out"), **ON_CPU)
    reference = sentence_transformers.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    wanted = reference.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    read = tokenizer(texts, padding=True, return_tensors="np")
    (hidden,) = session.run(None, {put_in.name: read[put_in.name] for put_in in session.get_inputs()})
    mean = (hidden * read["attention_mask"][..., None]).sum(1)
    found = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    assert np.abs(found - wanted).max() <= 1e-5
    assert {"modules.json", "1_Pooling"} <= {path.name for path in (tmp_path / "out").iterdir()}
