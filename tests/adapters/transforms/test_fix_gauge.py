"""The gauge of heads: a fixed model computes the same, and of all that compute the same there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import oracles
import pytest
from attention_layers import ARRAYS
from gauge_changes import assert_equal_layers, other_gauge, well_conditioned
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, isometry, normal, refused
from tnlib_adapters import (
    Attention,
    HeadNorm,
    Rotary,
    builtin_path,
    fix_gauge,
    head_order,
    open_checkpoint,
)


def make(
    heads: int = 4, kv: int = 4, d: int = 10, dh: int = 4, *, biases: bool = True, seed: int = 0, **facts: Any
) -> Attention:
    """A random layer in double precision."""
    w = {name: normal((n, d, dh), seed=seed + k) for k, (name, n) in enumerate((("W_Q", heads), ("W_K", kv)))}
    w |= {"W_V": normal((kv, d, dh), seed=seed + 2), "W_O": normal((heads, dh, d), seed=seed + 3)}
    if biases:
        w |= {"b_Q": normal((heads, dh), seed=seed + 4), "b_K": normal((kv, dh), seed=seed + 5)}
        w |= {"b_V": normal((kv, dh), seed=seed + 6), "b_O": normal((d,), seed=seed + 7)}
    return Attention(**{"scale": 0.3, **w, **facts})


def in_dtype(layer: Attention, dtype: Any) -> Attention:
    arrays = {name: a.astype(dtype) for name in ARRAYS if (a := getattr(layer, name)) is not None}
    return replace(layer, **arrays)


def patterns(layer: Attention, x: np.ndarray) -> np.ndarray:
    scores = np.where(layer.mask(len(x)), layer.scores(x).astype(np.float64), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def assert_same_function(fixed: Attention, layer: Attention, factor: float = 1e5) -> None:
    """The same patterns, heads in their new order, and the same output."""
    x = normal((7, layer.d_model), seed=99).astype(layer.W_Q.dtype)
    order = head_order(layer)
    ours, theirs = patterns(fixed, x), patterns(layer, x)
    assert_close(ours, theirs[order], layer.W_Q.dtype, factor)
    assert_close(fixed.frozen(ours).apply(x), layer.frozen(theirs).apply(x), layer.W_Q.dtype, factor)


HALVES, PAIRS = Rotary([1.0, 0.1]), Rotary([1.0, 0.1], pairs=True)
LAYERS: dict[str, Callable[[], Attention]] = {
    "plain": lambda: make(biases=False),
    "biases": make,
    "grouped": lambda: make(6, 2),
    "one_key": lambda: make(3, 1),
    "no_output_bias": lambda: replace(make(), b_O=None),
    "key_bias_alone": lambda: replace(make(), b_Q=None, b_V=None),
    "alibi": lambda: make(alibi=np.array([0.5, 0.25, 0.125, 0.0625])),
    "soft_cap": lambda: make(6, 2, softcap=2.0),
    "rotary": lambda: make(6, 2, rotary=HALVES),
    "pairs": lambda: make(rotary=PAIRS),
    "yarn": lambda: make(rotary=Rotary([1.0, 0.1], factor=1.2)),
    "partial": lambda: make(6, 2, dh=7, rotary=HALVES),
    "partial_pairs": lambda: make(4, 1, dh=7, rotary=PAIRS),
    "partial_soft_cap": lambda: make(4, 2, dh=7, rotary=PAIRS, softcap=3.0),
    "not_causal": lambda: make(causal=False),
    "window": lambda: make(window=3),
    "normalised": lambda: make(6, 2, rotary=HALVES, head_norm=norm_of(4)),
    "normalised_alike": lambda: make(6, 2, rotary=PAIRS, head_norm=HeadNorm(np.ones(4), np.ones(4), 1e-6)),
    "normalised_queries_alike": lambda: make(6, 2, rotary=HALVES, head_norm=HeadNorm(np.ones(4), keys_of(4), 1e-6)),
    "normalised_still": lambda: make(head_norm=norm_of(4)),
    "wider_than_the_stream": lambda: make(4, 2, d=3, dh=8),
    "one_number": lambda: make(1, 1, d=1, dh=1),
}


def keys_of(dh: int) -> np.ndarray:
    return normal((dh,), seed=12)


def norm_of(dh: int) -> HeadNorm:
    return HeadNorm(normal((dh,), seed=11), keys_of(dh), 1e-6)


# ---------------------------------------------------------------------------------------------------------- one layer


@pytest.mark.parametrize("name", LAYERS)
def test_a_fixed_layer_computes_the_same(name: str) -> None:
    layer = LAYERS[name]()
    assert_same_function(fix_gauge(layer), layer)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_compute_the_same_become_one(name: str) -> None:
    layer = LAYERS[name]()
    fixed = fix_gauge(layer)
    assert_equal_layers(fix_gauge(fixed), fixed)
    for seed in range(3):
        other = other_gauge(layer, seed)
        if layer.d_head > 1:
            assert oracles.norm(other.W_V - layer.W_V) > 0.1  # or nothing were tested
            assert oracles.norm(other.W_Q - layer.W_Q) > 0.1
        assert_equal_layers(fix_gauge(other), fixed)


@pytest.mark.slow
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2), st.integers(0, 3), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_any_sizes(kv: int, group: int, d: int, turning: int, still: int, pairs: bool, seed: int) -> None:
    dh = max(1, 2 * turning + still)
    rotary = Rotary(0.3 ** np.arange(turning), pairs=pairs) if turning else None
    layer = make(kv * group, kv, d, dh, rotary=rotary, seed=seed)
    fixed = fix_gauge(layer)
    assert_same_function(fixed, layer, 1e6)
    assert_equal_layers(fix_gauge(fixed), fixed, 1e-7)


def test_balanced_columns() -> None:
    fixed = fix_gauge(make(6, 2, dh=7, rotary=HALVES))
    for g in range(2):
        q = np.concatenate([np.concatenate([fixed.W_Q[h], fixed.b_Q[h : h + 1]]) for h in range(3 * g, 3 * g + 3)])  # type: ignore[index]
        k = np.concatenate([fixed.W_K[g], fixed.b_K[g : g + 1]])  # type: ignore[index]
        o = np.concatenate(list(fixed.W_O[3 * g : 3 * g + 3]), axis=1)
        v = fixed.W_V[g]
        for left, right in ((k[:, 4:], q[:, 4:]), (v, o.T)):
            grams = left.T @ left, right.T @ right
            assert_close(grams[0], grams[1])
            assert_close(grams[0], np.diag(np.diag(grams[0])))
            assert (np.diff(np.diag(grams[0])) <= 0).all()
            oracles.assert_signs(left)
        turns_q, turns_k = q[:, :2] + 1j * q[:, 2:4], k[:, :2] + 1j * k[:, 2:4]
        np.testing.assert_allclose(np.linalg.norm(turns_q, axis=0), np.linalg.norm(turns_k, axis=0), rtol=1e-12)
        oracles.assert_signs(turns_k)
    assert (np.diff(np.linalg.norm(fixed.W_O[:3].reshape(3, -1), axis=1)) < 0).all()
    assert np.linalg.norm(fixed.W_O[:3]) > np.linalg.norm(fixed.W_O[3:])


def test_biases_that_go_unseen_vanish() -> None:
    fixed = fix_gauge(make())
    assert fixed.b_K is not None
    assert fixed.b_V is not None
    assert not fixed.b_K.any()
    assert not fixed.b_V.any()
    partial = fix_gauge(make(dh=7, rotary=HALVES))
    assert partial.b_K is not None
    assert not partial.b_K[:, 4:].any()
    assert (partial.b_K[:, :4] != 0).all()  # queries see it turn


def test_biases_that_are_seen_stay() -> None:
    fixed = fix_gauge(LAYERS["soft_cap"]())
    assert fixed.b_K is not None
    assert fixed.b_K.any()
    without = fix_gauge(replace(make(), b_O=None))
    assert without.b_O is None
    assert without.b_V is not None
    assert without.b_V.any()


def test_places_that_slopes_belong_to_stay() -> None:
    layer = LAYERS["alibi"]()
    np.testing.assert_array_equal(head_order(layer), np.arange(4))
    np.testing.assert_array_equal(fix_gauge(layer).alibi, layer.alibi)


def test_where_heads_went() -> None:
    layer = make(6, 2, rotary=HALVES)
    order, fixed = head_order(layer), fix_gauge(layer)
    assert sorted(order.tolist()) == list(range(6))
    assert {frozenset(part.tolist()) for part in order.reshape(2, 3)} == {frozenset({0, 1, 2}), frozenset({3, 4, 5})}
    for p, head in enumerate(order):
        assert_close(fixed.qk(p, 3).full(), layer.qk(int(head), 3).full(), factor=1e4)
        assert_close(fixed.ov(p).full()[:-1], layer.ov(int(head)).full()[:-1], factor=1e4)


# ------------------------------------------------------------------------------------------------------ special cases


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equal_singular_values(dtype: str) -> None:
    """Isometric heads: the products leave the basis open, and heads are as long as each other."""
    w = [np.stack([isometry(10, 4, seed=4 * k + h) for h in range(4)]) for k in range(4)]
    layer = in_dtype(Attention(w[0], w[1], w[2], w[3].transpose(0, 2, 1), scale=1.0), dtype)
    fixed = fix_gauge(layer)
    assert_same_function(fixed, layer)
    for seed in range(4):
        assert_equal_layers(fix_gauge(other_gauge(layer, seed)), fixed, 1e5 * oracles.eps(dtype))


def test_heads_of_low_rank() -> None:
    """What a zero of the one side meets on the other is free."""
    layer = make(4, 2, dh=6, biases=False)
    for name, order in (("W_Q", (0, 1, 2)), ("W_O", (0, 2, 1))):
        w = getattr(layer, name).transpose(order).copy()
        w[..., 3:] = 0
        layer = replace(layer, **{name: w.transpose(order)})
    fixed = fix_gauge(layer)
    assert_same_function(fixed, layer)
    for name in ("W_Q", "W_K", "W_V"):
        assert not getattr(fixed, name)[..., 3:].any()
        assert getattr(fixed, name)[..., :3].any()
    key, value = layer.W_K.copy(), layer.W_V.copy()
    key[..., 3:], value[..., 3:] = normal((2, 10, 3), seed=5), 0
    other = replace(layer, W_K=key, W_V=value)
    assert_equal_layers(fix_gauge(other_gauge(other, 1)), fixed)
    single = in_dtype(other, np.float32)
    mixed = fix_gauge(other_gauge(single, 1))  # where zeros are roundoff
    assert not mixed.W_Q[..., 3:].any()
    assert_equal_layers(mixed, fix_gauge(single), 2e-4)


@pytest.mark.parametrize("rotary", [None, HALVES])
def test_heads_of_zeros_come_last(rotary: Rotary | None) -> None:
    layer = make(rotary=rotary)
    zero = {}
    for name in ("W_Q", "b_Q", "W_O"):
        zero[name] = getattr(layer, name).copy()
        zero[name][1] = 0
    layer = replace(layer, **zero)
    fixed = fix_gauge(layer)
    assert head_order(layer)[-1] == 1
    assert not any(w[-1].any() for w in (fixed.W_Q, fixed.W_K, fixed.W_V, fixed.W_O))
    assert_same_function(fixed, layer)
    assert_equal_layers(fix_gauge(other_gauge(layer, 2)), fixed)


def test_a_layer_of_zeros() -> None:
    layer = Attention(np.zeros((2, 3, 4)), np.zeros((1, 3, 4)), np.zeros((1, 3, 4)), np.zeros((2, 4, 3)), scale=1.0)
    fixed = fix_gauge(layer)
    assert not any(getattr(fixed, name).any() for name in ("W_Q", "W_K", "W_V", "W_O"))


@pytest.mark.parametrize("rotary", [None, HALVES])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_of_one_modulus(rotary: Rotary | None, dtype: str) -> None:
    """Which of them leads is not up to rounding."""
    layer = make(2, 2, biases=False, rotary=rotary)
    even = np.zeros((2, 10, 4))
    for f, columns in enumerate(([0, 2], [1, 3])):
        angle = np.random.default_rng(f).uniform(0, 2 * np.pi, (2, 10))
        even[:, :, columns] = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    layer = in_dtype(replace(layer, W_K=even if rotary else np.sign(even), W_V=np.sign(even)), dtype)
    fixed = fix_gauge(layer)
    for seed in range(4):
        assert_equal_layers(fix_gauge(other_gauge(layer, seed)), fixed, 1e4 * oracles.eps(dtype))


def test_equal_heads_and_negatives_of_each_other() -> None:
    layer = make(4, 1)
    for name in ("W_Q", "b_Q", "W_O"):
        a = getattr(layer, name).copy()
        a[1], a[2] = a[0], -a[0]
        layer = replace(layer, **{name: a})
    fixed = fix_gauge(layer)
    for seed in range(4):
        assert_equal_layers(fix_gauge(other_gauge(layer, seed)), fixed)


@pytest.mark.parametrize("pairs", [False, True])
def test_frequencies_that_occur_twice_and_planes_that_stand_still(pairs: bool) -> None:
    """Planes of one frequency mix, and one of frequency 0 belongs to the columns that do not turn."""
    rotary = Rotary([1.0, 0.1, 0.1, 0.0], pairs=pairs)
    layer = make(6, 2, dh=9, rotary=rotary)
    fixed = fix_gauge(layer)
    assert_same_function(fixed, layer)
    assert fixed.b_K is not None
    (a, b), rng = rotary.planes, np.random.default_rng(3)
    still = np.array([a[3], b[3], 8])
    assert not fixed.b_K[:, still].any()
    g = np.zeros((9, 9))
    g[np.ix_(still, still)] = well_conditioned(3, rng)
    z = np.zeros((3, 3), complex)
    z[0, 0], z[1:, 1:] = 2j, well_conditioned(2, rng) + 1j * well_conditioned(2, rng)
    for rows, columns, block in ((a, a, z.real), (a, b, z.imag), (b, a, -z.imag), (b, b, z.real)):
        g[np.ix_(rows[:3], columns[:3])] = block
    k = np.linalg.inv(g).T
    other = replace(layer, W_Q=layer.W_Q @ g, b_Q=layer.b_Q @ g, W_K=layer.W_K @ k, b_K=layer.b_K @ k)  # type: ignore[operator]
    x = normal((5, 10))
    assert_close(other.scores(x), layer.scores(x), factor=1e4)
    assert_equal_layers(fix_gauge(other), fixed)


def test_turns_under_a_norm_whose_weights_are_equal() -> None:
    layer = LAYERS["normalised_alike"]()
    angle = np.random.default_rng(0).uniform(0, 2 * np.pi, 2)
    turn = Rotary(angle, pairs=True)
    by_hand = {name: turn.rotate(getattr(layer, name), 1.0) for name in ("W_Q", "W_K", "b_Q", "b_K")}
    other = replace(layer, **by_hand)
    x = normal((5, 10))
    assert_close(other.scores(x), layer.scores(x), factor=1e4)
    assert_equal_layers(fix_gauge(other), fix_gauge(layer))


def test_a_norm_keeps_what_it_sees() -> None:
    """Lengths of queries and keys are seen through eps, and a shift of keys by their length."""
    layer = make(6, 2, rotary=HALVES, head_norm=norm_of(4))
    fixed = fix_gauge(layer)
    assert fixed.head_norm is not None
    w, v = fixed.head_norm.query.reshape(2, 2), fixed.head_norm.key.reshape(2, 2)
    np.testing.assert_allclose(np.linalg.norm(w, axis=0), np.linalg.norm(v, axis=0))
    assert (w >= 0).all()
    assert (v >= 0).all()
    assert (w[0] >= w[1]).all()
    longer = fix_gauge(replace(layer, W_Q=2 * layer.W_Q, b_Q=2 * layer.b_Q))  # type: ignore[operator]
    assert_close(longer.W_Q, 2 * fixed.W_Q)


def test_norms_with_weights_of_zero() -> None:
    layer = make(rotary=HALVES, head_norm=HeadNorm(np.eye(4)[0], keys_of(4), 1e-6))
    fixed = fix_gauge(layer)
    assert_same_function(fixed, layer)
    assert fixed.head_norm is not None
    assert not fixed.head_norm.key[[1, 3]].any()  # of the plane whose queries count for nothing


@pytest.mark.parametrize("rotary", [None, HALVES, PAIRS])
@pytest.mark.parametrize("head_norm", [False, True])
def test_single_precision(rotary: Rotary | None, head_norm: bool) -> None:
    single = in_dtype(make(6, 2, dh=7, rotary=rotary, head_norm=norm_of(7) if head_norm else None), np.float32)
    fixed = fix_gauge(single)
    assert {getattr(fixed, name).dtype for name in ARRAYS} == {np.dtype("float32")}
    assert_same_function(fixed, single, 1e3)
    if head_norm and rotary is None:
        return  # no architecture has that, and its gauge is not fixed
    for seed in range(3):
        assert_equal_layers(fix_gauge(other_gauge(single, seed)), fixed, 2e-4)


@pytest.mark.parametrize("rotary", [None, HALVES])
@pytest.mark.parametrize(("dtype", "exponent"), [("float64", 200), ("float32", 30)])
def test_any_scale(rotary: Rotary | None, dtype: str, exponent: int) -> None:
    narrow = in_dtype(make(4, 2, biases=False, rotary=rotary), dtype)
    fixed = fix_gauge(narrow)
    c = narrow.W_Q.dtype.type(2.0 ** int(exponent * np.log2(10)))
    moved = fix_gauge(replace(narrow, W_Q=narrow.W_Q * c, W_K=narrow.W_K / c, W_V=narrow.W_V / c, W_O=narrow.W_O * c))
    assert_equal_layers(moved, fixed, 1e3 * oracles.eps(dtype))
    tiny = fix_gauge(replace(narrow, W_Q=narrow.W_Q / c, W_K=narrow.W_K / c))
    assert_close(tiny.W_Q * c, fixed.W_Q, dtype, 1e4)


def test_arguments_are_not_changed_and_need_no_layout() -> None:
    layer = make(6, 2, dh=7, rotary=HALVES, head_norm=norm_of(7))
    kept = {name: getattr(layer, name).copy() for name in ARRAYS}
    strange = {name: np.asfortranarray(getattr(layer, name)) for name in ARRAYS}
    for a in strange.values():
        a.setflags(write=False)
    assert_equal_layers(fix_gauge(replace(layer, **strange)), fix_gauge(layer), 1e-12)
    for name, value in kept.items():
        np.testing.assert_array_equal(getattr(layer, name), value)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_has_no_heads_is_refused() -> None:
    with refused(TypeError, "fix_gauge: attention", "Attention or a Checkpoint", "got dict"):
        fix_gauge({})  # type: ignore[call-overload]
    with refused(TypeError, "head_order: attention", "got Checkpoint"):
        head_order(open_checkpoint(builtin_path()))  # type: ignore[arg-type]


def test_complex_weights_are_refused() -> None:
    layer = make(biases=False)
    with refused(ValueError, "fix_gauge: attention", "real weights"):
        fix_gauge(replace(layer, W_Q=layer.W_Q + 0j))
