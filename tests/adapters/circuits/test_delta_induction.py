"""The model made of deltas: it continues repeats, its heads are found, and its circuit is the one that was built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tnlib_adapters
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_close, refused
from tnlib_adapters import open_checkpoint, save_checkpoint
from tnlib_adapters.circuits import build_induction, find_circuit, find_induction, pattern_scores, weight_scores
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import run


@settings(max_examples=15)
@given(st.integers(2, 12), st.integers(0, 20), st.integers(0, 99))
def test_every_second_occurrence_is_continued(length: int, more: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = build_induction(length + more, 2 * length)
    tokens = np.tile(rng.permutation(length + more)[:length], 2)
    predicted = run(model, tokens).logits[0].argmax(axis=1)
    assert np.array_equal(predicted[length:-1], tokens[length + 1 :])


@pytest.mark.parametrize(("vocab", "context"), [(128, 96), (48, 48), (20, 60)])
def test_the_heads_are_those_that_were_built(vocab: int, context: int) -> None:
    model = build_induction(vocab, context)
    found = find_induction(model, n=4)
    assert found.previous_head == (0, 0)
    assert found.induction_heads == ((1, 0),)
    assert found.previous_token[0, 0] > 0.999
    assert found.induction[1, 0] > 0.98  # a token that recurs may have been preceded by itself
    assert found.copying[1, 0] == pytest.approx(1, abs=1e-6)
    by_weights = weight_scores(model)
    assert by_weights.previous.argmax() == 0
    assert by_weights.induction.argmax() == 1
    assert by_weights.writer(1, 0) == (0, 0)


def test_the_circuit_is_the_one_that_was_built() -> None:
    model = build_induction(48, 48)
    tokens, repeated = repeated_segments(4, vocab=48, context=48, rng=np.random.default_rng(0), distinct=True)
    found = find_circuit(model, tokens, repeated, loss_increase=0.01)
    writes = {"positions -> 0.0 Q", "positions -> 0.0 K", "tokens -> 0.0 V", "0.0 -> 1.0 K"}
    copies = {"tokens -> 1.0 Q", "tokens -> 1.0 V", "1.0 -> logits", "positions -> 1.0 K"}
    assert set(found.kept) == writes | copies


def test_sharper_heads_attend_to_less_else() -> None:
    tokens = np.tile(np.random.default_rng(0).permutation(30), 2)
    shares = [
        pattern_scores(run(build_induction(30, 60, sharpness=c), tokens).patterns, tokens).induction[1, 0]
        for c in (2, 5, 10, 20)
    ]
    assert np.all(np.diff(shares) > 0)
    assert shares[-1] == pytest.approx(1, abs=1e-6)


def test_it_is_written_and_opened_as_every_other(tmp_path: Path) -> None:
    model = build_induction(16, 48)
    save_checkpoint(model, tmp_path / "deltas")
    opened = open_checkpoint(tmp_path / "deltas")
    tokens = np.random.default_rng(1).integers(0, 16, 48)
    assert_close(run(opened, tokens).logits, run(model, tokens).logits)
    assert sorted(path.name for path in (tmp_path / "deltas").iterdir()) == ["config.json", "model.safetensors"]
    assert tnlib_adapters.freeze(model, tokens).blocks


def test_wrong_input_is_refused() -> None:
    with refused(ValueError, "build_induction: vocab must be at least 1"):
        build_induction(0)
    with refused(ValueError, "build_induction: sharpness must lie between 0 and 1000"):
        build_induction(sharpness=0.0)
    with refused(TypeError, "build_induction: context must be an integer"):
        build_induction(context=9.5)  # type: ignore[arg-type]
