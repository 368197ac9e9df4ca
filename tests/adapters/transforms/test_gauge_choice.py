"""The gauge that is chosen for rounding: the model computes the same, and its weights have entries of one size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gauge_changes import other_gauge
from slow_cases import mostly_slow
from tnlib_adapters import Attention, builtin_path, choose_gauge, fold, open_checkpoint
from tnlib_adapters.compression.methods.compensated_rounding import round_compensated
from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.reference.model import run
from tnlib_adapters.transforms.gauge_choice import incoherent_rotation, turned_heads

models = pytest.importorskip("transformers_models")

EXACT = 1e-5  # relative, of logits in single precision


def spread(x: np.ndarray) -> float:
    """The largest entry beside the root mean square of all."""
    return float(np.abs(x).max() / np.sqrt(np.square(x).mean()))


@pytest.mark.parametrize("name", mostly_slow(sorted(models.MODELS), ["llama", "gpt2_untied", "qwen3", "phi", "opt"]))
def test_logits_are_unchanged(name: str, tmp_path: Path) -> None:
    import architecture_table as table

    case = table.make_case(name, tmp_path)
    chosen = choose_gauge(case.checkpoint)
    assert table.reloaded(case, chosen.checkpoint) < EXACT
    assert table.chosen(case) < EXACT
    parts = " ".join((*chosen.done, *chosen.left))
    assert "stream" in parts
    assert "heads" in parts


@pytest.mark.parametrize(
    ("name", "part", "reason"),
    [
        ("bert", "the residual stream", "the model returns it"),
        ("bloom", "the residual stream", "cannot be rotated"),
        ("llama_tied", "the residual stream", "call fold first"),
        ("llama", "rotations of queries and keys", "rotary"),
        ("qwen3", "queries and keys", "norms"),
        ("deepseek_v3", "heads", "latent"),
    ],
)
def test_a_freedom_that_is_missing_is_named(name: str, part: str, reason: str, saved: Any) -> None:
    left = choose_gauge(open_checkpoint(saved(name)[1])).left
    assert any(line.startswith(part) and reason in line for line in left)


@pytest.mark.parametrize("n", [1, 7, 8, 24, 576])
def test_incoherent_rotations_are_orthogonal_and_mix_all_inputs(n: int) -> None:
    rotation = incoherent_rotation(n, np.random.default_rng(0))
    np.testing.assert_allclose(rotation.T @ rotation, np.eye(n), atol=1e-12)
    odd = n // (n & -n)
    assert np.abs(rotation).max() <= np.sqrt(odd / n) * (1 + 1e-12)


def layer() -> Attention:
    return open_checkpoint(builtin_path()).attention(0)


def test_heads_are_balanced_from_any_gauge() -> None:
    """Both weights of every head have the nuclear norm of their product as squared norm: no gauge has less."""
    for one in (layer(), other_gauge(layer(), seed=3)):
        turned = turned_heads(one, seed=0)
        for v, o in zip(turned.W_V, turned.W_O, strict=True):
            nuclear = np.linalg.svd(v.astype(np.float64) @ o, compute_uv=False).sum()
            np.testing.assert_allclose([np.square(v).sum(), np.square(o).sum()], nuclear, rtol=1e-4)


def test_a_head_with_one_large_column_is_rounded_better() -> None:
    """Scales per output share the range of the largest input of a head."""
    one = layer()
    scales = np.geomspace(1, 100, one.d_head)
    skewed = replace(one, W_V=one.W_V / scales, W_O=one.W_O * scales[:, None], b_V=one.b_V / scales)

    def error(attention: Attention) -> float:
        rounded = [
            round_compensated(np.concatenate(list(w), axis), IntegerFormat(3, 0)).values()
            for w, axis in ((attention.W_V, 1), (attention.W_O, 0))
        ]
        heads, d, dh = attention.W_V.shape
        values, outputs = rounded[0].reshape(d, heads, dh).swapaxes(0, 1), rounded[1].reshape(heads, dh, d)
        return float(np.linalg.norm(values @ outputs - attention.W_V @ attention.W_O))

    assert error(turned_heads(skewed, seed=0)) < 0.5 * error(skewed)
    assert error(turned_heads(one, seed=0)) < 1.1 * error(one)


def test_a_stream_with_an_outlier_loses_it() -> None:
    """After folding, every weight that reads the stream is spread over all coordinates."""
    folded = fold(open_checkpoint(builtin_path("llama"))).checkpoint
    chosen = choose_gauge(folded).checkpoint
    before, after = ([spread(one.attention(k).W_Q) for k in range(one.n_layers)] for one in (folded, chosen))
    assert max(after) < max(before)
    tokens = np.arange(1, 20)
    want, got = (run(one, tokens).logits for one in (folded, chosen))
    assert want is not None
    assert got is not None
    assert np.abs(got - want).max() < EXACT * np.abs(want).max()
