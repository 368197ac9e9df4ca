"""Tuning from end to end: what the study's last row does to a compressed checkpoint."""

from __future__ import annotations

import pytest
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from tnlib_adapters.instrument.running_model import open_running  # noqa: E402
from transformers_models import made_up_text, quiet, random_model, save_with_tokenizer  # noqa: E402  # noqa: E402

from benchmarks.calibrated import attention_parameters, open_factored, tune, tune_folder  # noqa: E402

NAMES = ("bert", "gpt2_lm", "llama_biases")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Pairs of a model and what is left of it at half, by name."""
    quiet()
    found = {}
    for name in NAMES:
        before = save_with_tokenizer(random_model(name), tmp_path_factory.mktemp(f"tuned_{name}"))
        after = before.parent / f"{before.name}_half"
        tnlib_adapters.compress(before, after, keep=0.5)
        found[name] = before, after
    return found


def error(before, model) -> float:
    from tnlib_adapters.compression.evaluation.evaluate import evaluate_running

    return evaluate_running(open_running(before), model, made_up_text()).error


@pytest.mark.parametrize("name", mostly_slow(NAMES, []))
def test_tuning_moves_the_attention_alone_and_nearer_to_the_original(folders, name):
    before, after = folders[name]
    model, untouched = open_factored(after), open_factored(after)
    # larger steps than a trained model takes that is near its original
    tune(open_running(before), model, model.batches(made_up_text()), rate=0.01, n_steps=30)
    assert error(before, model) < 0.8 * error(before, untouched)
    own = {id(parameter) for parameter in attention_parameters(model)}
    pairs = zip(model.model.named_parameters(), untouched.model.parameters(), strict=True)
    moved = {name: not torch.equal(one, other) for (name, one), other in pairs if one.numel()}
    outside = [name for name, parameter in model.model.named_parameters() if id(parameter) not in own]
    assert any(moved.values())
    assert not any(moved[name] for name in outside if name in moved)


def test_a_tuned_folder_loads_as_what_was_tuned_and_stores_no_more(folders, tmp_path):
    before, after = folders["bert"]
    tune_folder(before, after, made_up_text(), tmp_path / "out", n_steps=5)
    model = open_factored(after)
    tune(open_running(before), model, model.batches(made_up_text()), n_steps=5)
    again = open_factored(tmp_path / "out")
    for (name, one), other in zip(model.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert sum(p.numel() for p in again.model.parameters()) == sum(p.numel() for p in model.model.parameters())
