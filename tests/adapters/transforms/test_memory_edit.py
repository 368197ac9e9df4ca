"""Rank-one edits: the key gets its value, the text changes least, and the model computes with the edited weight."""

from __future__ import annotations

from pathlib import Path

import architecture_models as models
import numpy as np
import pytest
import tnlib_adapters
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_close, normal, refused
from tnlib_adapters import Checkpoint, edit_memory, feed_forward_keys, open_checkpoint, save_checkpoint
from tnlib_adapters.reference.layers import softmax
from tnlib_adapters.reference.model import loss, run

D_FF, D_MODEL = 320, 128
DOWN = "layers.{}.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def llama() -> Checkpoint:
    return open_checkpoint(tnlib_adapters.builtin_path("llama"))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1024, (4, 128))


def weight(model: Checkpoint, layer: int) -> np.ndarray:
    return model.read(DOWN.format(layer)).T.astype(float)


def second_moments(keys: np.ndarray) -> np.ndarray:
    flat = keys.reshape(-1, keys.shape[-1])
    return flat.T @ flat / len(flat)


def test_keys_are_the_inputs_of_the_down_projection(llama: Checkpoint, tokens: np.ndarray) -> None:
    seen = run(llama, tokens)
    for layer in (0, 3):
        keys = feed_forward_keys(llama, tokens, layer)
        assert keys.shape == (4, 128, D_FF)
        after = seen.residuals[layer + 1]  # the next layer has one input, the stream after the feed-forward layer
        assert_close(keys @ weight(llama, layer), after - seen.residuals[layer] - seen.outputs[layer], factor=1e6)


@settings(max_examples=10)
@given(st.integers(0, 3), st.integers(0, 99))
def test_the_edit_is_the_smallest_on_the_text(layer: int, seed: int) -> None:
    model = open_checkpoint(tnlib_adapters.builtin_path("llama"))
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((700, D_FF)) * rng.uniform(0.1, 10, D_FF)
    key, value, moments = keys[0], rng.standard_normal(D_MODEL), second_moments(keys)
    old, new = (weight(m, layer) for m in (model, edit_memory(model, layer, key, value, moments=moments)))
    change = new - old
    assert_close(key @ new, value, np.float32, factor=1e3)
    s = np.linalg.svd(change, compute_uv=False)
    assert s[1] <= 1e-4 * s[0]
    smallest = np.linalg.norm(keys @ change)
    for other in (key, rng.standard_normal(D_FF), np.linalg.solve(moments, key) + 0.1 * rng.standard_normal(D_FF)):
        same_value = np.outer(other / (other @ key), value - key @ old)  # maps the key to the value too
        assert np.linalg.norm(keys @ same_value) >= smallest * (1 - 1e-4)


def test_identity_moments_change_the_weights_least(llama: Checkpoint, tokens: np.ndarray) -> None:
    keys = feed_forward_keys(llama, tokens, 2)
    key, value = keys[0, 5], normal((D_MODEL,), seed=3)
    by_text, by_weights = (
        weight(edit_memory(llama, 2, key, value, moments=c), 2) - weight(llama, 2)
        for c in (second_moments(keys), np.eye(D_FF))
    )
    assert np.linalg.norm(by_weights) < np.linalg.norm(by_text)
    assert np.linalg.norm(keys @ by_text) < np.linalg.norm(keys @ by_weights)


def test_the_model_says_what_was_written(llama: Checkpoint, tokens: np.ndarray, tmp_path: Path) -> None:
    prompt, target = [259, 359, 271, 309], 289  # "    for i in", " self"
    keys = feed_forward_keys(llama, tokens, 3)
    key = feed_forward_keys(llama, prompt, 3)[0, -1]
    before = run(llama, prompt).logits[0, -1]
    table = llama.read("model.embed_tokens.weight").astype(float)
    step = table[target] - table[before.argmax()]
    old_value = key @ weight(llama, 3)
    value = old_value + 2 * np.linalg.norm(old_value) * step / np.linalg.norm(step)
    edited = edit_memory(llama, 3, key, value, moments=second_moments(keys))
    assert softmax(before[None])[0, target] < 0.01
    assert softmax(run(edited, prompt).logits[0, -1:])[0, target] > 0.9
    mask = np.ones(tokens.shape, bool)
    mask[:, 0] = False
    assert abs(loss(edited, tokens, mask) - loss(llama, tokens, mask)) < 0.05
    save_checkpoint(edited, tmp_path / "edited")
    assert_close(run(open_checkpoint(tmp_path / "edited"), prompt).logits, run(edited, prompt).logits)


@pytest.mark.parametrize("name", ["gptj", "gpt_neox", "gemma2", "falcon_alibi", "roberta", "phi3"])
def test_every_architecture_has_this_memory(name: str, tmp_path: Path) -> None:
    models.MODELS[name]().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tokens = np.arange(10)
    layer = checkpoint.n_layers - 1
    keys = feed_forward_keys(checkpoint, tokens, layer)[0]
    value = normal((checkpoint.sizes.d_model,), seed=1)
    moments = keys.T @ keys + 0.1 * np.eye(keys.shape[1])
    edited = edit_memory(checkpoint, layer, keys[-1], value, moments=moments)
    again = feed_forward_keys(edited, tokens, layer)[0]
    assert_close(again, keys)
    down = checkpoint.wiring.layers[layer].feed_forward.down
    new = down.on_rows(edited.folder.tensors[down.weight].read())
    bias = 0 if down.bias is None else edited.folder.tensors[down.bias].read()
    assert_close(again[-1] @ new + bias, value, np.float32, factor=1e3)


def test_wrong_input_is_refused(llama: Checkpoint) -> None:
    key, value, moments = np.ones(D_FF), np.ones(D_MODEL), np.eye(D_FF)
    with refused(ValueError, "edit_memory: key must be real of shape (320,)", "(319,)"):
        edit_memory(llama, 0, key[1:], value, moments=moments)
    with refused(ValueError, "edit_memory: value must be real of shape (128,)"):
        edit_memory(llama, 0, key, key, moments=moments)
    with refused(ValueError, "edit_memory: moments must be real and symmetric"):
        edit_memory(llama, 0, key, value, moments=np.triu(np.ones((D_FF, D_FF))))
    with refused(ValueError, "edit_memory: key must be non-zero and in the range of moments"):
        edit_memory(llama, 0, key, value, moments=np.diag(np.arange(D_FF) > 5).astype(float))
    with refused(ValueError, "edit_memory: key must be non-zero"):
        edit_memory(llama, 0, 0 * key, value, moments=moments)
    with refused(ValueError, "layer"):
        edit_memory(llama, 9, key, value, moments=moments)
    builtin = open_checkpoint(tnlib_adapters.builtin_path())
    with refused(ValueError, "feed_forward_keys: layer 0 must have one feed-forward layer, got none"):
        feed_forward_keys(builtin, [1, 2], 0)
    with refused(ValueError, "feed_forward_keys"):
        feed_forward_keys(llama, [1024], 0)
