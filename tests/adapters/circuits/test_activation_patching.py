"""Activation patching and the logit lens, beside hooks on models of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from oracles import refused
from slow_cases import mostly_slow
from tnlib_adapters import Checkpoint, builtin_path, open_checkpoint
from tnlib_adapters.attention.softmax import log_softmax
from tnlib_adapters.circuits import activation_patching, logit_lens
from tnlib_adapters.circuits.discovery import activation_patching as patching
from tnlib_adapters.data.coded_letters import coded_letters
from tnlib_adapters.reference.model import loss, run

TOKENS, ANSWERS = coded_letters(6, rng=3)
CLEAN, MASK, CORRUPTED = TOKENS[:3], ANSWERS[:3], TOKENS[3:]


@pytest.fixture(scope="module")
def coder() -> Checkpoint:
    return open_checkpoint(builtin_path("known_circuit"))


@pytest.fixture(scope="module")
def their_coder() -> Any:
    return tf.GPT2LMHeadModel.from_pretrained(builtin_path("known_circuit")).eval()


def their_loss(model: Any, module: Any = None, part: Any = None, *, of_input: bool = False) -> float:
    """Loss of the corrupted run with a part of what a module reads or writes taken from the clean run."""
    stored: list[torch.Tensor] = []

    def run_hooked(tokens: np.ndarray, hook: Any) -> Any:
        handles = []
        if module is not None:
            register = module.register_forward_pre_hook if of_input else module.register_forward_hook
            handles = [register(hook)]
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.double().numpy()
        for handle in handles:
            handle.remove()
        return logits

    def first(values: Any) -> Any:
        return values[0] if isinstance(values, tuple) else values

    def patch(values: Any) -> Any:
        patched = first(values).clone()
        patched[part] = stored[0][part]
        return (patched, *values[1:]) if isinstance(values, tuple) else patched

    run_hooked(CLEAN, lambda module, *values: stored.append(first(values[-1])))
    logits = run_hooked(CORRUPTED, lambda module, *values: patch(values[-1]))
    log_p = log_softmax(logits[:, :-1])
    return -float(np.take_along_axis(log_p, CLEAN[:, 1:, None], axis=2)[MASK[:, 1:]].mean())


@pytest.mark.parametrize("position", mostly_slow([2, 8, 10], [8]))
def test_patches_are_those_of_hooks(coder: Checkpoint, their_coder: Any, position: int) -> None:
    at = (slice(None), position)
    layer = their_coder.transformer.h[1]
    cases = {
        ("stream", "before 1"): {"module": layer, "part": at, "of_input": True},
        ("layers", "0"): {"module": their_coder.transformer.h[0].attn, "part": at},
        ("layers", "mlp 1"): {"module": layer.mlp, "part": at},
        ("heads", "1.2"): {"module": layer.attn.c_proj, "part": (*at, slice(16, 24)), "of_input": True},
        ("heads", "1.0"): {"module": layer.attn.c_proj, "part": (*at, slice(0, 8)), "of_input": True},
    }
    for (of, name), case in cases.items():
        found = activation_patching(coder, CLEAN, MASK, CORRUPTED, of=of)  # type: ignore[arg-type]
        assert found.corrupted == pytest.approx(their_loss(their_coder), rel=1e-4)
        value = found.recovered[found.names.index(name), position]
        ours = found.corrupted + value * (found.clean - found.corrupted)
        assert ours == pytest.approx(their_loss(their_coder, **case), rel=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gemma2", "gptj", "opt_after", "llama"])
def test_a_patched_embedding_is_another_token(name: str, opened: Any) -> None:
    _, weights = opened(name)
    rng = np.random.default_rng(0)
    clean, corrupted = rng.integers(3, 50, (2, 2, 6))
    clean[:, 4:] = corrupted[:, 4:]
    mask = np.broadcast_to(np.arange(6) == 5, clean.shape)
    found = activation_patching(weights, clean, mask, corrupted)
    assert not found.recovered[0, 4:].any()
    for position in (0, 3):
        mixed = corrupted.copy()
        mixed[:, position] = clean[:, position]
        wanted = (loss(weights, mixed, mask) - found.corrupted) / (found.clean - found.corrupted)
        assert found.recovered[0, position] == pytest.approx(wanted, rel=1e-6)
    outputs = activation_patching(weights, clean, mask, corrupted, of="layers")
    assert {"0", "mlp 0", "1", "mlp 1"} <= set(outputs.names)
    assert len(activation_patching(weights, clean, mask, corrupted, of="heads").names) % 2 == 0


def test_the_answer_comes_through_the_circuit(coder: Checkpoint) -> None:
    found = activation_patching(coder, CLEAN, MASK, CORRUPTED, of="heads", metric="kl")
    assert {name for name, row in zip(found.names, found.recovered, strict=True) if row.max() > 0.05} == {"0.0", "1.0"}
    assert abs(found.clean) < 1e-12
    assert found.to_frame().component[0] in ("0.0", "1.0")
    assert "KL divergence" in repr(found)


def test_the_lens_reads_every_stream(coder: Checkpoint, their_coder: Any) -> None:
    found = logit_lens(coder, CLEAN[0], k=4)
    assert found.streams == ("embedding", "0", "mlp 0", "1", "mlp 1")
    inner = their_coder.transformer
    with torch.no_grad():
        streams = inner(torch.from_numpy(CLEAN[:1]), output_hidden_states=True).hidden_states
        middle = their_coder.lm_head(inner.ln_f(streams[1]))[0].double().numpy()  # after block 0
    final = log_softmax(run(coder, CLEAN[0]).logits[0])
    for log_p, k in ((log_softmax(middle), 2), (final, 4)):
        order = np.argsort(-log_p, axis=1)[:, :4]
        assert np.array_equal(found.tokens[k], order)
        assert np.allclose(found.log_probabilities[k], np.take_along_axis(log_p, order, axis=1), atol=1e-4)
    divergence = (np.exp(final) * (final - log_softmax(middle))).sum(axis=1)
    assert np.allclose(found.divergences[2], divergence, atol=1e-4)
    assert found.divergences[-1] == pytest.approx(0, abs=1e-12)
    assert len(repr(found).splitlines()) == 7


def test_texts_of_tokens() -> None:
    found = logit_lens(open_checkpoint(builtin_path("llama")), [309, 6, 7], k=2)
    assert repr(found.names[int(found.tokens[-1, -1, 0])]) in repr(found).splitlines()[-1]


def test_refusals(coder: Checkpoint, opened: Any) -> None:
    with refused(ValueError, "activation_patching: of must be 'stream', 'layers' or 'heads', got 'head'"):
        activation_patching(coder, CLEAN, MASK, CORRUPTED, of="head")  # type: ignore[arg-type]
    with refused(ValueError, "activation_patching: corrupted must have the shape of tokens"):
        activation_patching(coder, CLEAN, MASK, CORRUPTED[:1])
    with refused(ValueError, "activation_patching: both runs must differ in the metric"):
        activation_patching(coder, CLEAN, MASK, CLEAN)
    with refused(ValueError, "logit_lens: k must be at most 32"):
        logit_lens(coder, CLEAN[0], k=33)
    with refused(ValueError, "tokens must be one sequence, got 3"):
        logit_lens(coder, CLEAN)


def test_long_texts_run_in_smaller_batches(coder: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many runs as positions if the patterns of one sequence exceed the bound, with the same result."""
    batches: list[int] = []
    attend = patching.attention_output

    def counted(layer: Any, x: np.ndarray) -> Any:
        batches.append(len(x))
        return attend(layer, x)

    together = activation_patching(coder, CLEAN, MASK, CORRUPTED)
    monkeypatch.setattr(patching, "attention_output", counted)
    monkeypatch.setattr(patching, "MOST_BYTES", 1)
    apart = activation_patching(coder, CLEAN, MASK, CORRUPTED)
    assert max(batches) == len(CLEAN)
    assert np.allclose(apart.recovered, together.recovered, rtol=0, atol=1e-10)
