"""Directions in tokens, and names of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attention_layers import homogeneous
from oracles import assert_close, normal, refused
from tnlib_adapters import Checkpoint, builtin_path
from tnlib_adapters.circuits import (
    read_vocabulary,
)
from tnlib_adapters.circuits.effective_head import stream_head
from tnlib_adapters.files.tokenizer import token_names
from tnlib_adapters.reference.weights import Weights
from token_streams import token_rows, without_weights

import tnlib

NAMES = ["gpt2_lm", "gpt2_untied", "bert", "opt", "opt_narrow", "llama", "llama_biases", "qwen3", "gemma2", "bloom"]
Opened = tuple[Checkpoint, Weights]


@pytest.mark.parametrize("name", NAMES)
def test_directions_meet_tokens_as_in_the_model(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, weights = opened(name)
    words, found = read_vocabulary(checkpoint), stream_head("stream_head", checkpoint, 1, 2)
    columns = normal((checkpoint.sizes.d_model + 1, 3), seed=1)
    bare = without_weights(token_rows(weights), found.norm)
    assert_close(words.read(columns, found.norm), homogeneous(bare) @ columns)
    assert len(words) == len(bare)


def test_names_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_path("llama"))
    names = token_names(builtin_path("llama"))
    assert names is not None
    assert len(names) == len(tokenizer) == 1024
    whole = [token for token in range(1, 1024) if not names[token].startswith("<0x")]
    assert len(whole) > 850
    assert all(names[token] == tokenizer.decode([token]) for token in whole)
    assert names[0] == "<|endoftext|>"
    words = {"a": 0, "\u0120b": 1, "\u00e9": 2}  # as GPT-2 keeps them; the last one is a byte of no letter
    (tmp_path / "vocab.json").write_text(json.dumps(words), encoding="utf-8")
    assert token_names(tmp_path) == {0: "a", 1: " b", 2: "<0xE9>"}


def test_folders_without_a_tokenizer_have_numbers(model: Checkpoint, tmp_path: Path) -> None:
    assert token_names(builtin_path()) is None
    assert read_vocabulary(model).name(17) == "17"
    (tmp_path / "vocab.txt").write_text("[PAD]\nthe\n##s\n", encoding="utf-8")
    assert token_names(tmp_path) == {0: "[PAD]", 1: "the", 2: "##s"}
    pieces = {"model": {"vocab": [["<s>", 0.0], ["\u2581the", -1.0]]}, "added_tokens": [{"id": 2, "content": "<new>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(pieces), encoding="utf-8")
    assert token_names(tmp_path) == {0: "<s>", 1: " the", 2: "<new>"}
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with refused(ValueError, "token_names", "must be JSON"):
        token_names(tmp_path)


def tokenizer(**changes: Any) -> str:
    content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<new>"}], "decoder": None}
    return json.dumps({key: value for key, value in (content | changes).items() if value is not ...})


DAMAGED = {
    "list": ("tokenizer.json", "[]", "a JSON object"),
    "model that is null": ("tokenizer.json", tokenizer(model=None), "in model,"),
    "vocabulary that is null": ("tokenizer.json", tokenizer(model={"vocab": None}), "in model.vocab,"),
    "number that is text": ("tokenizer.json", tokenizer(model={"vocab": {"a": "0"}}), "an integer"),
    "number that is a truth": ("tokenizer.json", tokenizer(model={"vocab": {"a": True}}), "an integer"),
    "number that is negative": ("tokenizer.json", tokenizer(model={"vocab": {"a": -1}}), "an integer"),
    "piece without a score": ("tokenizer.json", tokenizer(model={"vocab": [["a"]]}), "in model.vocab[0],"),
    "piece that is a number": ("tokenizer.json", tokenizer(model={"vocab": [["a", 0], [1, 1]]}), "in model.vocab[1],"),
    "added tokens that are null": ("tokenizer.json", tokenizer(added_tokens=None), "in added_tokens,"),
    "added token without a number": ("tokenizer.json", tokenizer(added_tokens=[{"content": ""}]), "added_tokens[0].id"),
    "added token without text": ("tokenizer.json", tokenizer(added_tokens=[{"id": 0}]), "added_tokens[0].content"),
    "repeated key": ("tokenizer.json", '{"model": {"vocab": {"a": 0, "a": 1}}}', "duplicate key 'a'"),
    "deep": ("tokenizer.json", tokenizer(decoder=0).replace(": 0}", ": " + "[" * 900 + "]" * 900 + "}"), "nested"),
    "lone surrogate": ("vocab.json", '{"\\ud800": 0}', "surrogates"),
    "list of words": ("vocab.json", '["a"]', "a JSON object"),
    "words without numbers": ("vocab.json", '{"a": null}', "an integer"),
    "number as a fraction": ("vocab.json", '{"a": 1.0}', "an integer"),
    "not a number": ("vocab.json", '{"a": NaN}', "JSON"),
    "bytes": ("vocab.json", b'{"\xff": 0}', "utf-8"),
    "lines of bytes": ("vocab.txt", b"a\n\xff\n", "UTF-8"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tokenizers_are_refused_by_file_and_place(case: str, tmp_path: Path) -> None:
    name, content, says = DAMAGED[case]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(tnlib.FileFormatError, f"token_names: {file} must", says, "save the tokenizer again"):
        token_names(tmp_path)


def test_lines_end_where_a_line_ends(tmp_path: Path) -> None:
    """Some characters separate lines for str.splitlines alone; they are words of multilingual vocabularies."""
    (tmp_path / "vocab.txt").write_bytes("a\r\n\u2028\n\x85\n\n##b".encode())
    assert token_names(tmp_path) == {0: "a", 1: "\u2028", 2: "\x85", 3: "", 4: "##b"}
