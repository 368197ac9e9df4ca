"""The canonical basis of the residual stream: the same for all rotations of a model, which it does not change."""

from __future__ import annotations

from pathlib import Path

import architecture_models as models
import numpy as np
import pytest
from oracles import isometry, refused
from slow_cases import mostly_slow
from tnlib_adapters import Checkpoint, builtin_path, fold, open_checkpoint, rotate, stream_basis
from tnlib_adapters.checkpoints import weight_stacks
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_unembedding


def opened(name: str, folder: Path) -> Checkpoint:
    """A model whose stream can be rotated."""
    if name in ("builtin", "llama"):
        return fold(open_checkpoint(builtin_path(*(["llama"] if name == "llama" else [])))).checkpoint
    models.MODELS[name]().double().save_pretrained(folder)
    return fold(open_checkpoint(folder)).checkpoint


def allowed_rotation(d: int, preserves_ones: bool) -> np.ndarray:
    if not preserves_ones:
        return isometry(d, d, np.float64, 1)
    frame = np.linalg.qr(np.column_stack([np.ones(d), np.eye(d)[:, 1:]]))[0][:, 1:]
    return frame @ isometry(d - 1, d - 1, np.float64, 1) @ frame.T + 1 / d


@pytest.mark.parametrize("name", mostly_slow(["builtin", "llama", "gptj", "gpt_neox"], ["builtin", "gptj"]))
def test_every_rotation_of_a_model_has_one_canonical_form(name: str, tmp_path: Path) -> None:
    model = opened(name, tmp_path)
    d, context = model.sizes.d_model, min(96, model.wiring.context or 96)
    tokens = np.random.default_rng(0).integers(0, 50, (6, context))
    other = rotate(model, allowed_rotation(d, name.startswith("gpt")))
    canonical, canonical_other = (rotate(m, stream_basis(m, tokens)) for m in (model, other))
    a, b = (run(m, tokens) for m in (canonical, canonical_other))
    stream = np.concatenate([x.reshape(-1, d) for x in a.residuals])
    for x, y in zip(a.residuals, b.residuals, strict=True):
        assert np.abs(x - y).max() <= 1e-3 * np.abs(stream).max()
    np.testing.assert_allclose(a.logits, run(model, tokens).logits, atol=1e-3 * np.abs(a.logits).max())
    if not name.startswith("gpt"):
        moments = stream.T @ stream
        assert np.abs(moments - np.diag(np.diag(moments))).max() <= 1e-5 * moments.max()
        assert np.all(np.diff(np.diag(moments)) <= 1e-5 * moments.max())


def test_too_little_text_is_refused() -> None:
    model = open_checkpoint(builtin_path())
    with refused(ValueError, "stream_basis: tokens must span all 64 directions"):
        stream_basis(model, np.arange(10))
    with refused(ValueError, "stream_basis: tokens must be integers"):
        stream_basis(model, [0.5])


@pytest.mark.parametrize("name", ["builtin", "llama", "opt_narrow", "gemma"])
def test_the_unembedding_is_a_stack(name: str, tmp_path: Path) -> None:
    if name in ("builtin", "llama"):
        model = open_checkpoint(builtin_path(*(["llama"] if name == "llama" else [])))
    else:
        models.MODELS[name]().save_pretrained(tmp_path)
        model = open_checkpoint(tmp_path)
    view = weight_stacks.unembedding(model)
    assert view.legs == ("token", "d_model")
    np.testing.assert_allclose(view.array, read_unembedding(model).affine.weight.T, rtol=1e-5, atol=1e-6)


def test_a_model_without_logits_has_no_unembedding(tmp_path: Path) -> None:
    models.MODELS["llama_base"]().save_pretrained(tmp_path)
    with refused(ValueError, "unembedding: checkpoint must end in logits"):
        weight_stacks.unembedding(open_checkpoint(tmp_path))
