"""The typed reading of config.json: every key that a row reads is checked, and no other."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import CONFIG, change_config
from oracles import assert_close, refused
from slow_cases import mostly_slow
from tnlib_adapters import Attention, open_checkpoint, save_checkpoint
from tnlib_adapters.architectures.config_keys import KEYS, SYNONYMS
from tnlib_adapters.architectures.table import ARCHITECTURES

from tnlib import FileFormatError, TnlibError

pytest.importorskip("torch")
pytest.importorskip("architecture_models")

# One model of every row; of those with several ways of placing tokens, the one with most keys.
OF_ROW = {row: row for row in ARCHITECTURES if row != "tnlib_attention_only"}
OF_ROW |= {"gemma3_text": "gemma3", "llama": "llama_3", "phi3": "phi3_longrope"}
OF_ROW |= {"qwen2": "qwen2_window", "falcon": "falcon_new"}
OF_ROW |= {"deepseek_v2": "deepseek_v2_groups", "deepseek_v3": "deepseek_v3_experts"}

# Values of another type or out of every range, by the type of the right one.
WRONG: dict[type, list[Any]] = {
    bool: ["yes", 1, 0.5, [], {}],
    int: [True, "2", 1.5, -1, 2**31, 10**40, [], {"a": 1}],
    float: [True, "0.5", -1.0, 1e308, 5e-324, 10**90, [0.5], {}],
    str: [1, False, 0.5, ["a"], {}],
    list: ["x", 1, True, [[]], [None], {}],
    dict: ["x", 1, True, [1]],
}


@pytest.fixture
def folder(saved: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Name of a row -> a folder of one of its models."""
    return lambda row: Path(shutil.copytree(saved(OF_ROW[row])[1], tmp_path / row))


def read_keys(row: str, config: dict[str, Any]) -> list[str]:
    """Keys of a config that a row reads, under the names that the config has for them."""
    known = ARCHITECTURES[row]
    wanted = {*known.config_keys, *known.required, *(("rope_parameters",) if known.rope else ())}
    wanted |= {name for group in SYNONYMS for name in group if wanted & {*group}}
    return [key for key in config if key in wanted and config[key] is not None]


def wrong_values(key: str, value: Any) -> Iterator[Any]:
    """Wrong values of a key in place of a right one: those of its type, and those of its members."""
    right = {"query_pre_attn_scalar": [1.5], "mscale": [5e-324], "mscale_all_dim": [5e-324]}.get(key, [])
    yield from (wrong for wrong in WRONG[type(value)] if wrong not in right)
    if isinstance(value, list) and value and isinstance(value[0], str):
        yield value[:-1]
    if isinstance(value, dict):
        for name, member in value.items():
            for wrong in wrong_values(name, member) if member is not None else ():
                yield {**value, name: wrong}


@pytest.mark.parametrize("row", mostly_slow(OF_ROW, [*OF_ROW][::3]))
def test_wrong_values_of_every_key_are_refused_by_name(row: str, folder: Callable[[str], Path]) -> None:
    place = folder(row)
    original = json.loads((place / CONFIG).read_text())
    keys = read_keys(row, original)
    assert len(keys) > 4
    for key in keys:
        for value in wrong_values(key, original[key]):
            (place / CONFIG).write_text(json.dumps({**original, key: value}))
            with pytest.raises(FileFormatError) as caught:
                open_checkpoint(place)
            assert key in str(caught.value), f"{key} = {value!r:.80}: {caught.value}"
            assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("row", mostly_slow(OF_ROW, [*OF_ROW][::3]))
def test_keys_that_are_missing_or_null_are_read_or_refused(row: str, folder: Callable[[str], Path]) -> None:
    place = folder(row)
    original = json.loads((place / CONFIG).read_text())
    n_opened = 0
    for key in (*read_keys(row, original), *ARCHITECTURES[row].config_keys):
        for value in (..., None):
            change_config(place, **{**original, key: value})
            try:
                checkpoint = open_checkpoint(place)
                checkpoint.attention(0)
            except TnlibError:
                continue
            n_opened += 1
    assert n_opened > 1


@pytest.mark.parametrize("row", OF_ROW)
def test_defaults_of_rows_are_those_of_transformers(row: str) -> None:
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[row]()
    ours = {key: value for key, value in ARCHITECTURES[row].defaults.items() if hasattr(theirs, key)}
    assert ours == {key: getattr(theirs, key) for key in ours}


@pytest.mark.parametrize("row", OF_ROW)
def test_keys_that_a_row_does_not_read_stay_as_they_are(
    row: str, folder: Callable[[str], Path], saved: Any, tmp_path: Path
) -> None:
    place, known = folder(row), ARCHITECTURES[row]
    read = {*known.config_keys, *known.required}
    read |= {name for group in SYNONYMS for name in group if read & {*group}}
    others: dict[str, Any] = dict.fromkeys([key for key in KEYS if key not in read], "of another model")
    others["initializer_range"] = [-1]
    change_config(place, **others)
    checkpoint = open_checkpoint(place)
    assert checkpoint.wiring == open_checkpoint(saved(OF_ROW[row])[1]).wiring
    save_checkpoint(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert {key: written[key] for key in others} == others


@pytest.mark.parametrize("row", ["bert", "gpt2", "bloom", "mixtral", "deepseek_v3", "t5"])
def test_sizes_of_another_model_are_refused_at_once(row: str, folder: Callable[[str], Path]) -> None:
    place = folder(row)
    original = json.loads((place / CONFIG).read_text())
    keys = [key for key in read_keys(row, original) if type(original[key]) is int and "position" not in key]
    no_sizes = ("sliding_window", "relative_attention_max_distance", "first_k_dense_replace", "num_experts_per_tok")
    sizes = [key for key in keys if key not in no_sizes]
    for value in (2**16, 2**24, 2**31 - 1, 2**31):
        for values in ({**original, **dict.fromkeys(sizes, value)}, *({**original, key: value} for key in sizes)):
            (place / CONFIG).write_text(json.dumps(values))
            start = time.process_time()
            with pytest.raises(FileFormatError):
                open_checkpoint(place)
            assert time.process_time() - start < 1.0  # milliseconds; the work, not the wait on a busy machine


def test_numbers_may_be_written_as_integers(folder: Callable[[str], Path]) -> None:
    place = folder("gemma2")
    want = open_checkpoint(place).attention(0)
    original = json.loads((place / CONFIG).read_text())
    section = {**original["rope_parameters"], "rope_theta": int(original["rope_parameters"]["rope_theta"])}
    change_config(place, query_pre_attn_scalar=7, attn_logit_softcapping=2, rope_parameters=section)
    got = open_checkpoint(place).attention(0)
    assert (got.scale, got.softcap) == (want.scale, 2.0)
    assert got.rotary is not None
    assert want.rotary is not None
    assert_close(got.rotary.frequencies, want.rotary.frequencies)


def test_positions_begin_within_the_context(folder: Callable[[str], Path]) -> None:
    place = folder("roberta")
    change_config(place, pad_token_id=30)
    assert open_checkpoint(place).wiring.embedding.first_position == 31
    change_config(place, pad_token_id=31)
    with refused(FileFormatError, "open_checkpoint: max_position_embeddings", "first position, 32", "got 32"):
        open_checkpoint(place)


def test_layers_are_listed_one_by_one(folder: Callable[[str], Path]) -> None:
    place = folder("gemma2")
    kinds = ["sliding_attention", "full_attention"]
    for listed, words in (
        (kinds[:1], ("2 layers", "got 1")),
        (kinds * 2, ("2 layers", "got 4")),
        ([kinds[0], "linear_attention"], ("full_attention or sliding_attention", "linear_attention")),
    ):
        change_config(place, layer_types=listed)
        with refused(FileFormatError, "open_checkpoint: layer_types", *words):
            open_checkpoint(place)


def test_configs_of_models_in_memory_are_checked_alike(saved: Any) -> None:
    model = copy.deepcopy(saved("gpt2")[0])
    for key, value in (("scale_attn_weights", "no"), ("n_head", float("nan")), ("n_positions", np.inf)):
        before = getattr(model.config, key)
        model.config.__dict__[key] = value
        with refused(FileFormatError, f"Attention.from_module: {key} in the config of GPT2Model"):
            Attention.from_module(model, 0)
        model.config.__dict__[key] = before
    assert Attention.from_module(model, 0).n_heads == 4
