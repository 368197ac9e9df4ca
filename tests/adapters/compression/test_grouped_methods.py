"""Methods where query heads share a key and value head, or queries and keys are turned before they meet."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from compressed_folders import relative, tail
from oracles import normal
from tnlib_adapters.compression.methods.decompositions import Heads, TuckerStack, ValueHeads, factorise_layer
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.method_table import METHODS
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes, stack, unstack

D, HEADS, KV, DH = 12, 6, 2, 5
GROUP = HEADS // KV
SIZES = Sizes(n_layers=1, n_heads=HEADS, d_model=D, kv_heads=KV, d_head=DH)


def layer(biases: str = "qkvo", seed: int = 0) -> Projections:
    """Weights whose spectra decay, of heads whose widths together are not d_model."""
    weights = {}
    for k, name in enumerate(NAMES):
        u, _, vh = np.linalg.svd(normal((D, SIZES.widths[name]), seed=seed + k), full_matrices=False)
        weight = (u * 0.8 ** np.arange(len(vh))) @ vh
        weights[name] = weight.T if name == "o" else weight
    sizes = {**SIZES.widths, "o": D}
    return Projections(weights, {b: 0.2 * normal((sizes[b],), seed=seed + 9 + k) for k, b in enumerate(biases)})


def with_bias(one: Projections, name: str, head: int) -> np.ndarray:
    own = slice(head * DH, (head + 1) * DH)
    bias = one.biases.get(name, np.zeros(SIZES.widths[name]))
    return np.vstack([one.weights[name], bias])[:, own]


def of_group(one: Projections, kind: str, kv_head: int) -> np.ndarray:
    """The operators of all query heads that share a key and value head, multiplied out."""
    queries = range(kv_head * GROUP, (kv_head + 1) * GROUP)
    if kind == "qk":
        return np.vstack([with_bias(one, "q", h) @ with_bias(one, "k", kv_head).T for h in queries])
    outputs = [one.weights["o"][h * DH : (h + 1) * DH] for h in queries]
    return np.hstack([with_bias(one, "v", kv_head) @ output for output in outputs])


def multiplied_out(found: Factorised, choice: list[int], before: Projections) -> Projections:
    return before.updated(expand(found.matrices(choice), SIZES))


def last(found: Factorised) -> list[int]:
    return [len(curve.costs) - 1 for curve in found.curves]


ALL = [(name, functools.partial(factorise_layer, row)) for name, row in METHODS.items()]
ALL += [("heads, turned", functools.partial(factorise_layer, METHODS["heads"], rotary=True))]
each_method = pytest.mark.parametrize("method", [m for _, m in ALL], ids=[name for name, _ in ALL])


@pytest.mark.parametrize("biases", ["qkvo", "qkv", ""])
@each_method
def test_costs_count_every_factor(method: Callable[..., Factorised], biases: str) -> None:
    before = layer(biases)
    found = method(before, SIZES)
    n_weights = sum(w.size for w in before.weights.values())
    for choice in ([0] * len(found.curves), [k // 2 for k in last(found)], last(found)):
        pieces = found.matrices(choice)
        promised = sum(int(curve.costs[k]) for curve, k in zip(found.curves, choice, strict=True))
        assert sum(a.size for piece in pieces for a in piece.arrays.values()) == promised
        held = expand(pieces, SIZES).biases
        assert found.fixed == sum(bias.size for name, bias in before.biases.items() if name not in held)
        assert all(held[name].shape == before.biases[name].shape for name in held)
    assert promised + found.fixed == n_weights + sum(bias.size for bias in before.biases.values())


@each_method
def test_the_largest_options_are_the_model(method: Callable[..., Factorised]) -> None:
    before = layer()
    found = method(before, SIZES)
    after = multiplied_out(found, last(found), before)
    for kind in ("qk", "vo"):
        for kv_head in range(KV):
            assert relative(of_group(before, kind, kv_head), of_group(after, kind, kv_head)) < 1e-13


@pytest.mark.parametrize("biases", ["qkvo", ""])
def test_heads_that_share_are_truncated_as_one(biases: str) -> None:
    """At every rank the error is the tail of the singular values of their operators together: no rank does better."""
    before = layer(biases)
    found = Heads(before, SIZES)
    assert len(found.curves) == 2 * KV
    for block, curve in enumerate(found.curves):
        kind, kv_head = ("qk", "vo")[block // KV], block % KV
        operator = of_group(before, kind, kv_head)
        s = np.linalg.svd(operator, compute_uv=False)
        for rank in range(DH + 1):
            choice = [*last(found)[:block], rank, *last(found)[block + 1 :]]
            after = of_group(multiplied_out(found, choice, before), kind, kv_head)
            assert relative(operator, after) == pytest.approx(tail(s, rank), rel=1e-9, abs=1e-13)
            assert curve.errors[rank] == pytest.approx(tail(s, rank) ** 2, rel=1e-9, abs=1e-14)


def test_turned_queries_and_keys_are_matrices() -> None:
    before = layer()
    found = ValueHeads(before, SIZES)
    assert len(found.curves) == 2 + KV
    for block, name in enumerate("qk"):
        s = np.linalg.svd(before.weights[name], compute_uv=False)
        for option in range(len(found.curves[block].costs)):
            choice = last(found)
            choice[block] = option
            after = multiplied_out(found, choice, before)
            want = tail(s, option + 1) if option < last(found)[block] else 0.0
            assert relative(before.weights[name], after.weights[name]) == pytest.approx(want, rel=1e-9, abs=1e-13)
            np.testing.assert_array_equal(after.biases[name], before.biases[name])


def test_stacks_of_groups() -> None:
    """Query heads beside the key, the value and the outputs that they share."""
    before = layer()
    x = stack(before, SIZES)
    assert x.shape == (2 * GROUP + 2, KV, D, DH)
    for head in range(HEADS):
        own = slice(head * DH, (head + 1) * DH)
        np.testing.assert_array_equal(x[head % GROUP, head // GROUP], before.weights["q"][:, own])
        np.testing.assert_array_equal(x[GROUP + 2 + head % GROUP, head // GROUP], before.weights["o"][own].T)
    for name, weight in unstack(x).weights.items():
        np.testing.assert_array_equal(weight, before.weights[name])


def test_errors_of_a_stack_of_groups() -> None:
    before = layer("")
    found = TuckerStack(before, SIZES)
    x = stack(before, SIZES)
    for option, error in enumerate(found.curves[0].errors):
        after = stack(multiplied_out(found, [option], before), SIZES)
        assert relative(x, after) ** 2 == pytest.approx(error, rel=1e-6, abs=1e-13)
