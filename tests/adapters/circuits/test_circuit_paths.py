"""Paths through frozen layers: by order, head and position against every path written out, and against the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import assert_close, normal, refused, unchanged
from tnlib_adapters import Checkpoint, FrozenAttention, FrozenStack, freeze
from tnlib_adapters.circuits import Paths, path_contributions, path_losses, stream_by_order
from tnlib_adapters.reference.model import Forward, run

import tnlib

N, D = 4, 6


@pytest.fixture(scope="module")
def seen(model: Checkpoint) -> Forward:
    segment = np.random.default_rng(0).permutation(128)[:12]
    return run(model, np.concatenate([segment, segment]))


@pytest.fixture(scope="module")
def trained(model: Checkpoint, seen: Forward) -> FrozenStack:
    return freeze(model, [patterns[0] for patterns in seen.patterns])


def small(heads: tuple[int, ...] = (2, 1, 3), seed: int = 0) -> FrozenStack:
    """Layers of various counts of heads, of various ranks, the first of them with a dense matrix."""
    layers = []
    for layer, count in enumerate(heads):
        s = seed + 20 * layer
        right: list[Any] = [
            tnlib.LowRank(normal((D, 2 + h), seed=s + h) / 2, normal((2 + h, D), seed=s + 5 + h) / 2)
            for h in range(count)
        ]
        if layer == 0:
            right[0] = normal((D, D), seed=s + 9) / 2
        layers.append(
            FrozenAttention(
                tnlib.KroneckerTerms(normal((count, N, N), seed=s + 10), right), normal((N, D), seed=s + 11)
            )
        )
    return FrozenStack(layers)


def written_out(stack: FrozenStack, x: np.ndarray) -> list[tuple[tuple[Any, ...], tuple[Any, ...], np.ndarray]]:
    """Every source and every path from there with what it carries to the end, (N, D): ("x",) or ("bias", layer)."""
    carried: list[tuple[tuple[Any, ...], tuple[Any, ...], np.ndarray]] = [(("x",), (), x)]
    for number, layer in enumerate(stack.layers):
        rights = [np.asarray(b) for b in layer.terms.right]
        carried += [
            (source, (*path, (number, h)), layer.terms.left[h] @ y @ rights[h].T)
            for source, path, y in carried
            for h in range(len(rights))
        ]
        carried.append((("bias", number), (), layer.constant))
    return carried


# ------------------------------------------------------------------------------------------------------ lists of paths


def test_paths_add_up_to_the_stack() -> None:
    stack = small()
    paths, x = Paths(stack), normal((N, D), seed=99)
    listed = list(paths)
    assert len(listed) == len(set(listed)) == len(paths) == 3 * 2 * 4
    assert [len(path) for path in listed] == sorted(len(path) for path in listed)
    assert [paths.count(order) for order in range(4)] == [sum(len(p) == m for p in listed) for m in range(4)]
    total = sum(paths[path].apply(x) for path in listed)
    assert_close(total + stack.constant, stack.apply(x), factor=1000)


def test_a_path_is_as_narrow_as_its_narrowest_head() -> None:
    paths = Paths(small((3, 3)))
    one = paths[(0, 1), (1, 2)]
    assert one.right[0].ranks == (3,)
    want = np.asarray(paths.stack.layers[1].terms.right[2]) @ np.asarray(paths.stack.layers[0].terms.right[1])
    assert_close(np.asarray(one.right[0]), want, factor=1000)
    assert_close(one.left[0], paths.stack.layers[1].terms.left[2] @ paths.stack.layers[0].terms.left[1])


def test_a_path_goes_up() -> None:
    paths = Paths(small())
    for path in (((1, 0), (0, 0)), ((0, 0), (0, 1))):
        with refused(ValueError, "path must go up"):
            paths[path]
    with refused(ValueError, "head must lie between 0 and 0"):
        paths[((1, 3),)]


# --------------------------------------------------------------------------------------------------------- all at once


@pytest.mark.parametrize("max_order", [None, 0, 1, 2, 9])
@pytest.mark.parametrize("position", [-1, 1])
def test_contributions_are_those_of_all_paths(max_order: int | None, position: int) -> None:
    stack, x, directions = small(), normal((N, D), seed=98), normal((3, D), seed=97)
    with unchanged(x, directions):
        found = path_contributions(stack, x, directions, position=position, max_order=max_order)
    m = 3 if max_order is None else min(max_order, 3)
    want = {name: np.zeros_like(getattr(found, name)) for name in ("by_order", "by_bias", "through", "last")}
    assert want["by_order"].shape == (3, m + 2)
    for source, path, y in written_out(stack, x):
        reading, order = directions @ y[position], min(len(path), m + 1)
        want["by_order"][:, order] += reading
        if source[0] == "bias":
            want["by_bias"][:, order, source[1]] += reading
        for head in path:
            want["through"][:, order, found.heads.index(head)] += reading
        if path:
            want["last"][:, order, found.heads.index(path[-1])] += reading
    for name, value in want.items():
        assert_close(getattr(found, name), value, factor=1e4)
    assert_close(found.total, directions @ stack.apply(x)[position], factor=1e3)
    assert_close(found.by_source.sum(axis=2) + found.by_bias.sum(axis=2), found.by_order, factor=1e3)


def test_contributions_by_source_position_are_those_of_moving_the_source() -> None:
    stack, x, w = small(), normal((N, D), seed=98), normal((D,), seed=97)
    found = path_contributions(stack, x, w, position=2)
    for i in range(N):
        alone = np.zeros_like(x)
        alone[i] = x[i]
        want = stream_by_order(stack, alone)[:, 2] @ w - stream_by_order(stack, 0 * x)[:, 2] @ w
        assert_close(found.by_source[:, i], want, factor=1e4)


@pytest.mark.parametrize("max_order", [None, 0, 2])
def test_the_stream_by_order_is_that_of_all_paths(max_order: int | None) -> None:
    stack, x = small(), normal((N, D), seed=98)
    found = stream_by_order(stack, x, max_order=max_order)
    want = np.zeros_like(found)
    for _, path, y in written_out(stack, x):
        want[min(len(path), len(want) - 1)] += y
    assert_close(found, want, factor=1e4)


def test_a_remainder_is_not_a_difference() -> None:
    """What is left of a deep stack is far below roundoff of the whole, and right to its own digits."""
    heads = tnlib.KroneckerTerms(1e-4 * normal((2, N, N)), [normal((D, D), seed=1), normal((D, D), seed=2)])
    stack = FrozenStack([FrozenAttention(heads, np.zeros((N, D)))] * 6)
    rest = stream_by_order(stack, normal((N, D)), max_order=4)[-1]
    longest = sum(stream_by_order(stack, normal((N, D)))[5:])
    assert_close(rest, longest, factor=1e4)
    assert np.linalg.norm(rest) < 1e-14


def test_losses_without_paths() -> None:
    stack, x = small(), normal((N, D), seed=98)
    every = written_out(stack, x)

    def loss(y: np.ndarray) -> float:
        return float(np.sum(y**4))

    found = path_losses(stack, x, loss, max_order=2)
    whole = stack.apply(x)
    assert found.loss == pytest.approx(loss(whole))
    for order in range(4):
        missing = sum((y for _, path, y in every if len(path) == order), np.zeros((N, D)))
        kept = sum((y for _, path, y in every if len(path) <= order), np.zeros((N, D)))
        assert found.without_order[order] == pytest.approx(loss(whole - missing) - found.loss)
        assert found.up_to_order[order] == pytest.approx(loss(kept))
    for k, head in enumerate(found.heads):
        missing = sum((y for _, path, y in every if head in path), np.zeros((N, D)))
        assert found.without_head[k] == pytest.approx(loss(whole - missing) - found.loss, rel=1e-8)


def test_the_induction_heads_carry_the_logit(trained: FrozenStack, seen: Forward, model: Checkpoint) -> None:
    """Nearly all of a repeated token's logit is one head of layer 1, read where the token stands."""
    assert seen.logits is not None
    token = int(seen.logits[0, -2].argmax())
    unembed = model.read("unembed.weight").astype(float)
    found = path_contributions(trained, seen.residuals[0][0], unembed[token] - unembed.mean(axis=0), position=-2)
    second = [k for k, (layer, _) in enumerate(found.heads) if layer == 1]
    assert found.last[:, second].sum() > 0.7 * found.total
    assert int(found.by_source.sum(axis=0).argmax()) == 11  # the token that is to be copied


def test_wrong_arguments_are_refused() -> None:
    stack, x = small(), normal((N, D))
    with refused(ValueError, "x must have shape", "(4, 6)", "(6, 4)"):
        path_contributions(stack, x.T, normal((D,)))
    with refused(ValueError, "directions must have shape (6,)", "(5,)"):
        path_contributions(stack, x, normal((5,)))
    with refused(ValueError, "position must lie between 0 and 3"):
        path_contributions(stack, x, normal((D,)), position=4)
    with refused(ValueError, "max_order"):
        stream_by_order(stack, x, max_order=-1)
    with refused(TypeError, "stack must be a FrozenStack"):
        Paths("stack")  # type: ignore[arg-type]
    with refused(TypeError, "stack must be a FrozenStack"):
        path_losses([stack], x, np.sum)  # type: ignore[arg-type]
