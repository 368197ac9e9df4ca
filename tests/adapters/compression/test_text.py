"""Calibration data of all kinds: what is read of a file, and what a model reads of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import refused
from slow_cases import mostly_slow
from tnlib_adapters.compression.text import hold_out, read_documents

from tnlib import ArgumentError, MissingFileError

CONVERSATION = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


def written(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def read(path: Path) -> list[Any]:
    return read_documents("compress", "calibration", path)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one line\n\nand another\n")
    assert read(file) == ["one line\n\nand another\n"]


def test_json_lines_are_the_documents_that_they_hold(tmp_path: Path) -> None:
    documents = ["one line", "two\nlines", "with \u2028 and \u00e9"]
    file = written(tmp_path / "text.jsonl", *({"id": 3, "text": one} for one in documents))
    file.write_text(file.read_text() + "\n\n")
    assert read(file) == documents
    file.write_text("\n".join(json.dumps({"text": one}, ensure_ascii=False) for one in documents), encoding="utf-8")
    assert read(file) == documents
    assert read(written(file, {"messages": CONVERSATION}, {"text": "words"})) == [CONVERSATION, "words"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        '{"words": "a"}',
        '{"text": 3}',
        '["text"]',
        "[" * 10**5,
        '{"text": "\\ud800"}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": ["a"]}]}',
        '{"messages": "words"}',
    ],
)
def test_other_json_lines_are_refused_by_their_number(line: str, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "words"}\n\n' + line)
    with refused(ArgumentError, "compress: calibration must have an object with a string", "in line 3 of", str(file)):
        read(file)


def test_arrays_are_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "ids.npy"
    np.save(file, np.arange(5, dtype=np.uint16))
    assert [own.tolist() for own in read(file)] == [[0, 1, 2, 3, 4]]
    np.save(file, np.arange(6).reshape(2, 3))
    assert [own.tolist() for own in read(file)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("values", [np.ones(3), np.ones((2, 2, 2), int), np.array(["a"]), np.array({}, object)])
def test_other_arrays_are_refused(values: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", values)
    with refused(ArgumentError, "compress: calibration must hold integers (tokens,) or (documents, tokens), got"):
        read(tmp_path / "ids.npy")


def test_what_is_no_array_or_not_there_is_refused(tmp_path: Path) -> None:
    with refused(MissingFileError, "found none at"):
        read(tmp_path / "ids.npy")
    (tmp_path / "ids.npy").write_bytes(b"no array")
    with refused(ArgumentError, "got another file"):
        read(tmp_path / "ids.npy")
    np.save(tmp_path / "ids.npy", np.zeros(0, int))
    with refused(ArgumentError, "must hold text, got none"):
        read(tmp_path / "ids.npy")


def test_datasets_on_disk_are_read_row_by_row(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "words"}, {"text": "more words"}])
    rows.save_to_disk(str(tmp_path / "rows"))
    assert read(tmp_path / "rows") == ["words", "more words"]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "splits"))
    with refused(ArgumentError, "must be one split of a dataset, got train, test"):
        read(tmp_path / "splits")
    (tmp_path / "rows" / "state.json").write_text("{}")
    with refused(ArgumentError, "a folder that datasets saved", "name another"):
        read(tmp_path / "rows")


@pytest.mark.parametrize("count", [1, 8, 9, 10, 29, 150, 1234])
def test_a_tenth_is_held_out(count: int) -> None:
    calibration, held_out = hold_out(range(count))
    assert sorted([*calibration, *held_out]) == list(range(count))
    assert abs(len(held_out) - count / 10) <= 1 + count / 100
    assert calibration == sorted(calibration)


@pytest.fixture
def with_template(folders: Any, tmp_path: Path) -> Path:
    """A language model whose tokenizer has a chat template."""
    folder = Path(shutil.copytree(folders["gpt2_lm"], tmp_path / "chat"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def test_a_language_model_reads_windows_of_all_documents(folders: Any) -> None:
    pytest.importorskip("torch")
    from tnlib_adapters.instrument.running_model import open_running

    model = open_running(folders["gpt2_lm"], max_tokens=4)
    words = [f"w{k}" for k in range(1, 10)]
    whole = model.tokenizer("\n".join(words))["input_ids"]
    windows = [whole[k : k + 4] for k in range(0, len(whole), 4)]
    assert model.sequences(words) == [window for window in windows if len(window) > 1]  # one token predicts nothing
    ids = np.arange(1, 8)
    assert model.sequences([ids]) == [[1, 2, 3, 4], [5, 6, 7]]
    together = [token for window in model.sequences([*words, ids]) for token in window]
    assert together == [*whole, *ids.tolist()][: len(together)]
    assert len(together) >= len(whole) + len(ids) - 1


def test_an_embedding_model_reads_lines(folders: Any) -> None:
    pytest.importorskip("torch")
    from tnlib_adapters.instrument.running_model import open_running

    model = open_running(folders["bert"], max_tokens=6)
    found = model.sequences(["w1 w2\n\nw3", np.arange(1, 10)])
    assert found == [*model.tokenizer(["w1 w2", "w3"])["input_ids"], list(range(1, 7))]
    assert model.count_truncated(["w1 w2\n" + "w3 " * 9]) == 1
    with refused(ArgumentError, "conversations need a language model", "pass text"):
        model.sequences([CONVERSATION])


def test_conversations_go_through_the_template(with_template: Path, folders: Any) -> None:
    pytest.importorskip("torch")
    from tnlib_adapters.instrument.running_model import open_running

    model = open_running(with_template)
    wanted = model.tokenizer("user w1 w2 assistant w3 ", add_special_tokens=False)["input_ids"]
    assert model.sequences([CONVERSATION]) == [wanted]
    with refused(ArgumentError, "whose tokenizer has a chat template", "pass text"):
        open_running(folders["gpt2_lm"]).sequences([CONVERSATION])


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(wrong: int, folders: Any) -> None:
    pytest.importorskip("torch")
    from tnlib_adapters.instrument.running_model import open_running

    with refused(ArgumentError, "token ids must lie below", f"got {wrong}", "tokenizer of this model"):
        open_running(folders["gpt2_lm"]).sequences([np.array([1, wrong])])


@pytest.mark.parametrize("kind", mostly_slow(["npy", "messages"], ["messages"]))
def test_compress_and_evaluate_read_all_kinds(
    kind: str, with_template: Path, tmp_path: Path, without_pictures: Any
) -> None:
    import tnlib_adapters

    if kind == "npy":
        file = tmp_path / "ids.npy"
        np.save(file, np.random.default_rng(0).integers(4, 20, 2000))
    else:
        file = written(tmp_path / "chats.jsonl", *[{"messages": CONVERSATION}] * 200)
    report = tnlib_adapters.compress(
        with_template,
        tmp_path / "out",
        tnlib_adapters.Budget(bits=4),
        calibration=tnlib_adapters.Calibration(file, window=8),
        effort="low",
    )
    assert report.calibration["window"] == 8
    assert report.calibration["held_out"] >= 5
    assert report.measured is not None
    assert tnlib_adapters.evaluate(with_template, tmp_path / "out", file).divergence >= 0
