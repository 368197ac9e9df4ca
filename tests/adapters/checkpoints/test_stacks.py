"""Stacks of weights as views with named legs, and formats compared at equal stored numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import assert_close, isometry, normal, refused, true_error
from tnlib_adapters import Attention, View, builtin_path, compare_formats, open_checkpoint
from tnlib_adapters.checkpoints import weight_stacks as stacks
from tnlib_adapters.checkpoints.format_table import _with_random_vectors
from tnlib_adapters.reference.weights import read_weights

import tnlib

FORMATS = ("svd", "tensor train", "tucker", "cp")


# ----------------------------------------------------------------------------------------------------------- the views


@pytest.mark.parametrize("name", ["builtin", "gpt2_lm", "llama", "phi3", "falcon_new"])
def test_heads_of_all_layers(name: str, saved: Any) -> None:
    checkpoint = open_checkpoint(builtin_path() if name == "builtin" else saved(name)[1])
    for projection in "QKVO":
        view = stacks.heads(checkpoint, projection)  # type: ignore[arg-type]
        assert view.legs == ("layer", "head", "d_model", "d_head")
        for layer in range(checkpoint.n_layers):
            w = getattr(checkpoint.attention(layer), f"W_{projection}")
            np.testing.assert_array_equal(view.array[layer], w.transpose(0, 2, 1) if projection == "O" else w)


def test_projections_are_the_stack(model: Any) -> None:
    view = stacks.projections(model.attention(1))
    np.testing.assert_array_equal(view.array, model.attention(1).stacked())
    assert repr(view) == "View(all projections of a layer: projection 4 x head 4 x d_model 64 x d_head 16, float32)"


@pytest.mark.parametrize("circuit", ["qk", "ov"])
def test_cores_have_the_singular_values_of_the_operators(circuit: Any, model: Any) -> None:
    layer = model.attention(1)
    core, dense = stacks.cores(layer, circuit), stacks.operators(layer, circuit)
    assert core.shape == (4, 16, 16)
    assert dense.shape == (4, 65, 65)
    for h in range(4):
        want = getattr(layer, circuit)(h).full()
        np.testing.assert_array_equal(dense.array[h], want)
        s = np.linalg.svd(want.astype(float), compute_uv=False)
        np.testing.assert_allclose(np.linalg.svd(core.array[h], compute_uv=False), s[:16], atol=1e-5 * s[0])


def test_cores_of_a_wide_layer_need_little_memory() -> None:
    """A layer of 1024 x 16 heads of 64 on 4 key heads: less than its own size in half precision."""
    import tracemalloc

    w = [normal((heads, 1024, 64), seed=h).astype(np.float32) for h, heads in enumerate((16, 4, 4, 16))]
    layer = Attention(*w[:3], w[3].transpose(0, 2, 1), scale=1.0)
    tracemalloc.start()
    for circuit in ("qk", "ov"):
        stacks.cores(layer, circuit)  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * sum(a.size for a in w)


def test_cores_under_rotary_embeddings_belong_to_a_distance(saved: Any) -> None:
    layer = open_checkpoint(saved("llama")[1]).attention(0)
    near, far = (stacks.cores(layer, "qk", distance=n).array for n in (0, 5))
    assert np.linalg.norm(near - far) > 0.01 * np.linalg.norm(near)
    with refused(ValueError, ": distance must be given", "rotary"):
        stacks.cores(layer, "qk")
    assert stacks.cores(layer, "ov").shape == (4, 6, 6)


@pytest.mark.parametrize("name", ["gpt2_lm", "bert", "llama", "phi3", "falcon_new", "opt"])
def test_feed_forward_matrices_act_on_rows(name: str, saved: Any) -> None:
    checkpoint = open_checkpoint(saved(name)[1])
    views = stacks.mlp(checkpoint, 1)
    d = checkpoint.sizes.d_model
    assert [view.legs for view in views[:-1]] == [("d_model", "d_ff")] * (len(views) - 1)
    assert views[-1].legs == ("d_ff", "d_model")
    assert all(view.shape[0] == d for view in views[:-1])
    assert len(views) == (3 if name == "llama" else 2)
    layers = [b.layer for block in read_weights(checkpoint).blocks for b in block.branches]
    feed_forward = [layer for layer in layers if not isinstance(layer, Attention)][1]
    assert_close(views[-1].array, feed_forward.down.weight, np.float32)
    ups = [feed_forward.up.weight] if feed_forward.gate is None else [feed_forward.gate.weight, feed_forward.up.weight]
    assert_close(np.concatenate([view.array for view in views[:-1]], axis=1), np.concatenate(ups, axis=1), np.float32)


def test_embeddings_and_finer_legs(model: Any) -> None:
    view = stacks.embedding(model)
    np.testing.assert_array_equal(view.array, model.read("embed.weight"))
    finer = view.split("d_model", (4, 16)).split("token", (8, 16))
    assert finer.legs == ("token.0", "token.1", "d_model.0", "d_model.1")
    np.testing.assert_array_equal(finer.array, view.array.reshape(8, 16, 4, 16))


def test_views_go_into_every_decomposition(model: Any) -> None:
    view = stacks.projections(model.attention(0))
    for fit in (tnlib.tt_svd(view, rtol=0.3), tnlib.tucker(view, rtol=0.3), tnlib.svd(view, left=(0, 1), rtol=0.3)):
        assert true_error(view.array, fit.value) <= 0.3
    matrix = stacks.embedding(model)
    assert true_error(matrix.array, tnlib.ttm_svd(matrix, (8, 16), (8, 8), rtol=0.3).value) <= 0.3


# ---------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("keep", [0.05, 0.25, 0.6, 1.0])
def test_no_format_stores_more_than_its_share(keep: float, model: Any) -> None:
    view = stacks.cores(model.attention(0), "ov")
    table = compare_formats(view, keep=keep)
    assert table.limit == int(keep * 1024)
    assert sorted(row.format for row in table.rows) == sorted(FORMATS)
    assert [row.error for row in table.rows] == sorted(row.error for row in table.rows)
    for row in table.rows:
        if row.value is None:
            assert row.n_parameters > table.limit
            assert row.error == 1.0
            continue
        assert row.n_parameters == row.value.n_parameters <= table.limit
        assert row.ranks == row.value.ranks
        assert row.error == pytest.approx(true_error(view.array, row.value), abs=1e-5)


def test_tolerances_are_used_up() -> None:
    """One more step of any rank would not fit: the next smaller tolerance stores too much."""
    x = normal((6, 7, 8), seed=3)
    table = compare_formats(x, keep=0.3)
    for name, decompose in (("tensor train", tnlib.tt_svd), ("tucker", tnlib.tucker)):
        tighter = decompose(x, rtol=0.98 * table[name].error).value  # type: ignore[operator]
        assert tighter.n_parameters > table.limit, name


def test_the_format_of_the_array_wins() -> None:
    factors = [isometry(n, 3, seed=n) for n in (10, 11, 12)]
    cp = tnlib.CP(np.array([3.0, 2.0, 1.0]), factors).full()
    assert compare_formats(cp, keep=0.08).rows[0].format == "cp"
    low_rank = normal((30, 3)) @ normal((3, 40), seed=1)
    table = compare_formats(low_rank, keep=0.2, formats=("svd",))
    assert table["svd"].error < 1e-12
    kron = np.kron(normal((6, 4)), normal((5, 10), seed=1))
    table = compare_formats(kron, keep=0.1, pairs=((6, 5), (4, 10)))
    assert table.rows[0].format == "TT-matrix"
    assert table.rows[0].error < 1e-12


def test_a_random_array_shares_nothing_between_matrices() -> None:
    """Matrices of one pair of subspaces are a Tucker format; with random ones of the same values they are not."""
    left, right = isometry(20, 2, seed=1), isometry(24, 2, seed=2)
    x = left @ normal((3, 5, 2, 2), seed=3) @ right.T
    table = compare_formats(x, keep=0.1, formats=("tucker", "tensor train", "svd"), beside_random=True)
    assert table["tucker"].error < 1e-12 < 0.5 < table["tucker"].random_error
    of_random = _with_random_vectors(x)
    assert_close(np.linalg.svd(of_random, compute_uv=False), np.linalg.svd(x, compute_uv=False), factor=1e3)
    again = compare_formats(of_random, keep=0.1, formats=("tucker", "tensor train", "svd"))
    assert {row.format: row.error for row in again.rows} == {row.format: row.random_error for row in table.rows}
    lines = repr(table).splitlines()
    assert "random error" in lines[1]
    assert "random error" not in repr(again)
    independent = compare_formats(normal((12, 10, 10)), keep=0.3, formats=("tucker", "cp"), beside_random=True)
    assert all(row.error == pytest.approx(row.random_error, rel=0.05) for row in independent.rows)


def test_a_random_array_is_of_uniformly_random_rotations() -> None:
    """The mean of an entry of a random rotation of a matrix is 0 with variance |A|^2 / (m n)."""
    x = np.broadcast_to(np.diag([3.0, 1.0]), (4000, 2, 2))
    entries = _with_random_vectors(x).reshape(len(x), -1)
    assert np.abs(entries.mean(axis=0)).max() < 5 * np.sqrt(10 / 4 / len(x))
    assert np.allclose((entries**2).mean(axis=0), 10 / 4, rtol=0.1)


def test_the_table_is_printed() -> None:
    table = compare_formats(View("a stack", normal((4, 5, 6)), ("a", "b", "c")), keep=0.1, formats=("svd", "cp"))
    lines = repr(table).splitlines()
    assert lines[0] == "a stack: a 4 x b 5 x c 6, float64, at most 12 parameters"
    assert "exceeds the limit at rank 1" in repr(table)
    assert len(lines) == 4


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda m: View("x", np.ones((2, 2)), ("a",)), ValueError, ["View: legs", "2 different names"]),
        (lambda m: View("x", np.ones((2, 2)), ("a", "a")), ValueError, ["View: legs", "('a', 'a')"]),
        (lambda m: View("x", None, ("a",)), ValueError, ["View: legs must be 0 different names"]),
        (lambda m: View("x", np.ones((2, 2)), None), TypeError, ["View: legs must be names", "None"]),
        (lambda m: stacks.embedding(m).split(["token"], (8, 8)), ValueError, ["View.split: leg", "['token']"]),
        (lambda m: stacks.projections(m), TypeError, ["projections: attention must be an Attention", "Checkpoint"]),
        (lambda m: stacks.cores(m, "ov"), TypeError, ["cores: attention must be an Attention", "Checkpoint"]),
        (lambda m: stacks.heads(builtin_path(), "Q"), TypeError, ["heads: checkpoint must be a Checkpoint"]),
        (lambda m: builtin_path(["llama"]), ValueError, ["builtin_path: name must be one of", "['llama']"]),
        (lambda m: stacks.embedding(m).split("dmodel", (8, 8)), ValueError, ["View.split: leg", "token, d_model"]),
        (lambda m: stacks.embedding(m).split("d_model", (8, 9)), ValueError, ["View.split: sizes", "64", "72"]),
        (lambda m: stacks.heads(m, "W"), ValueError, ["heads: projection", "'Q', 'K', 'V' or 'O', got 'W'"]),
        (lambda m: stacks.cores(m.attention(0), "kq"), ValueError, ["cores: circuit", "'kq'"]),
        (lambda m: stacks.operators(m.attention(0), 1), ValueError, ["operators: circuit", "got 1"]),
        (lambda m: stacks.mlp(m, 0), ValueError, ["mlp: checkpoint", "tnlib_attention_only"]),
        (lambda m: compare_formats(np.ones(5), keep=0.5), ValueError, ["compare_formats: view", "two legs", "(5,)"]),
        (lambda m: compare_formats(np.eye(5), keep=0.0), ValueError, ["compare_formats: keep", "(0, 1]"]),
        (lambda m: compare_formats(np.eye(5), keep="a"), TypeError, ["compare_formats: keep"]),
        (lambda m: compare_formats(np.eye(6), keep=0.5, pairs=3), TypeError, ["compare_formats: pairs", "got 3"]),
        (lambda m: compare_formats(np.eye(6), keep=0.5, formats=None), ValueError, ["formats", "got None"]),
        (lambda m: compare_formats(np.eye(5), keep=0.5, formats=("tt",)), ValueError, ["formats", "'tt'", "'tucker'"]),
    ],
)
def test_what_cannot_be_is_refused(call: Any, kind: type[Exception], words: list[str], model: Any) -> None:
    with refused(kind, "got", *words):
        call(model)


def test_layers_and_images(saved: Any) -> None:
    with refused(ValueError, "mlp: layer", "between 0 and 2", "got 3"):
        stacks.mlp(open_checkpoint(saved("gpt2")[1]), 3)
    with refused(ValueError, "embedding: checkpoint must read tokens", "vit"):
        stacks.embedding(open_checkpoint(saved("vit")[1]))
