"""Checkpoints in any gauge of their heads become one, which transformers computes the same from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from gauge_changes import assert_equal_layers, in_other_gauge
from oracles import assert_close, refused
from slow_cases import mostly_slow
from tnlib_adapters import (
    builtin_path,
    fix_gauge,
    fold,
    head_order,
    open_checkpoint,
    rotate,
    save_checkpoint,
)
from tnlib_adapters.reference.model import run

from tnlib import ArgumentError

# Of which transformers takes some norms and softmaxes in single precision, whatever its own.
SINGLE = 2e-6


def names() -> list[str]:
    try:
        from transformers_models import MODELS
    except ImportError:
        return []
    return sorted(name for name in MODELS if not name.startswith("deepseek"))


@pytest.mark.parametrize("name", mostly_slow(names(), names()[::9]))
def test_checkpoints_in_any_gauge_compute_the_same_and_become_one(name: str, saved: Any, tmp_path: Path) -> None:
    from transformers_models import decoder_inputs, inputs, loaded_like, outputs

    model = copy.deepcopy(saved(name)[0]).double()
    model.save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    other = in_other_gauge(checkpoint, seed=5)
    fixed, same = fix_gauge(checkpoint), fix_gauge(other)
    for k in range(checkpoint.n_layers):
        assert oracles.norm(other.attention(k).W_Q - checkpoint.attention(k).W_Q) > 0.1
        assert_equal_layers(same.attention(k), fixed.attention(k), 1e-7)
    x = inputs(model)
    x = x.astype(np.float64) if x.dtype.kind == "f" else x
    y = decoder_inputs(model, x)
    assert_close(run(other, x, y).hidden, run(checkpoint, x, y).hidden, factor=1e6)
    save_checkpoint(fixed, tmp_path / "fixed")
    want = outputs(model, x)
    assert oracles.norm(outputs(loaded_like(model, tmp_path / "fixed"), x) - want) <= SINGLE * oracles.norm(want)


def test_latent_vectors_are_refused(saved: Any) -> None:
    checkpoint = open_checkpoint(saved("deepseek_v3")[1])
    with refused(ArgumentError, "fix_gauge: attention", "deepseek_v3", "latent vectors", "numerator()"):
        fix_gauge(checkpoint)
    with refused(ArgumentError, "fix_gauge: attention", "norm of latent vectors", "numerator()"):
        fix_gauge(checkpoint.attention(0))
    bilinear = checkpoint.attention(1).numerator()
    fixed = fix_gauge(bilinear)
    order = head_order(bilinear)
    for head in range(4):
        assert_close(fixed.ov(head).full(), bilinear.ov(order[head]).full(), np.float32, factor=64)
        assert_close(fixed.qk(head, 3).full(), bilinear.qk(order[head], 3).full(), np.float32, factor=64)


@pytest.mark.slow
def test_a_trained_model_in_single_precision(saved: Any, tmp_path: Path) -> None:
    from transformers_models import loaded_like, outputs

    model, folder = saved("minilm")
    save_checkpoint(fix_gauge(open_checkpoint(folder)), tmp_path / "fixed")
    x = np.arange(2, 20).reshape(2, 9)
    assert_close(outputs(loaded_like(model, tmp_path / "fixed"), x), outputs(model, x), np.float32, 200)


def test_the_built_in_model(tmp_path: Path) -> None:
    checkpoint, x = open_checkpoint(builtin_path()), np.arange(20)
    fixed = fix_gauge(checkpoint)
    assert_close(run(fixed, x).logits, run(checkpoint, x).logits, np.float32, 200)
    for k in range(2):
        theirs = run(checkpoint, x).patterns[k][:, head_order(checkpoint.attention(k))]
        assert_close(run(fixed, x).patterns[k], theirs, np.float32, 200)
        assert_equal_layers(fixed.attention(k), fix_gauge(checkpoint.attention(k)), 1e-12)
    alone, layer = fixed.head(1, 2), fixed.attention(1)
    np.testing.assert_array_equal(alone.W_Q[0], layer.W_Q[2])


@pytest.mark.parametrize("name", ["llama_biases", "gpt2_lm", "falcon_new"])
def test_after_folding_and_rotating(name: str, saved: Any) -> None:
    """Changes of one checkpoint go on top of each other."""
    checkpoint, x = open_checkpoint(saved(name)[1]), np.arange(2, 11)
    folded = fold(checkpoint).checkpoint
    d = checkpoint.sizes.d_model
    turned = rotate(folded, np.eye(d)[np.random.default_rng(0).permutation(d)])
    for fixed in (fix_gauge(folded), fix_gauge(turned), rotate(fix_gauge(folded), np.eye(d))):
        got, want = run(fixed, x).logits, run(checkpoint, x).logits
        assert got is not None
        assert_close(got, want, np.float32, 1000)
    assert_equal_layers(
        fix_gauge(fold(fix_gauge(folded)).checkpoint).attention(1), fix_gauge(folded).attention(1), 1e-4
    )


def test_half_precision_comes_out_single(saved: Any, tmp_path: Path) -> None:
    import torch

    half = copy.deepcopy(saved("llama_biases")[0]).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    checkpoint = open_checkpoint(tmp_path / "half")
    fixed, x = fix_gauge(checkpoint), np.arange(2, 11)
    assert fixed.attention(0).W_Q.dtype == np.float32
    assert_close(run(fixed, x).hidden, run(checkpoint, x).hidden, np.float32, 1000)
