"""Loadings of heads in edges, beside a push of the source through one head and one key at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import refused
from tnlib_adapters import Attention, Checkpoint, freeze, open_checkpoint
from tnlib_adapters.circuits import head_loadings, logit_contributions
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import Weights, read_weights

from benchmarks.smollm2 import smollm2

TOKENS = np.array([5, 6, 7, 8, 5, 6])


@pytest.mark.parametrize("name", ["gpt2_lm", "gptj", "llama", "gemma2", "opt_after", "deepseek_v3", "bloom"])
def test_edges_of_tokens_are_their_contributions(name: str, opened: Any) -> None:
    """Where feed-forward layers are passed; without biases, loadings of all tokens are the paths through a head."""
    contributions = logit_contributions(freeze(opened(name)[1], TOKENS), 9, position=4)
    edges = [head_loadings(contributions, source, through="all") for source in range(len(TOKENS))]
    assert [edge.total for edge in edges] == pytest.approx(contributions.by_position, rel=1e-9, abs=1e-12)
    assert not any(loadings[:, 5].any() for edge in edges for loadings in edge.layers.values())
    if name in ("llama", "gemma2"):
        for layer, heads in edges[0].layers.items():
            whole = np.sum([edge.layers[layer] for edge in edges], axis=(0, 2))
            for h in range(len(heads)):
                want = contributions.through[contributions.names.index(f"{layer}.{h}")]
                assert whole[h] == pytest.approx(want, rel=1e-9, abs=1e-12)


def pushed(weights: Weights, stream: np.ndarray, at: tuple[int, int, int] | None, layers: range) -> np.ndarray:
    """The final stream that a change of the stream makes, by heads alone, with patterns and divisors of the text.

    With `at`, what passes layer at[0] only by head at[1] and key at[2].
    """
    seen, count = run(weights, TOKENS), -1
    for block in weights.blocks:
        (branch,) = block.branches
        layer = branch.layer
        if not isinstance(layer, Attention):
            continue
        count += 1
        if count not in layers:
            continue
        assert branch.before is not None
        x = seen.residuals[count][0]
        read = stream / np.sqrt((x**2).mean(axis=1, keepdims=True) + branch.before.eps) * branch.before.weight
        added = np.zeros_like(stream)
        for h in range(layer.n_heads):
            pattern = seen.patterns[count][0, h].copy()
            if at is not None and at[0] == count:
                pattern *= (h == at[1]) * (np.arange(len(TOKENS)) == at[2])
            added += pattern @ (read @ layer.W_V[layer.kv_head(h)]) @ layer.W_O[h]
        stream = added if at is not None and at[0] == count else stream + added
    return stream


def check_against_pushes(weights: Weights, layer: int, places: list[tuple[int, int, int]]) -> None:
    seen, n_layers = run(weights, TOKENS), sum(len(b.branches) for b in weights.blocks) // 2
    direction = np.random.default_rng(0).standard_normal(len(weights.final_norm.weight))  # type: ignore[union-attr]
    contributions = logit_contributions(freeze(weights, TOKENS), direction=direction, position=4)
    norm: Any = weights.final_norm
    x = seen.residuals[-1][0]
    readout = direction * norm.weight / np.sqrt((x[4] ** 2).mean() + norm.eps)
    feature = np.random.default_rng(1).standard_normal(len(direction))
    for vector in (None, feature):
        source = np.zeros_like(x)
        source[1] = seen.residuals[layer][0, 1] if vector is None else vector
        found = head_loadings(contributions, 1, vector=vector, layer=layer)
        assert [*found.layers] == [*range(layer, n_layers)]
        layers = range(layer, n_layers)
        assert found.total == pytest.approx(pushed(weights, source, None, layers)[4] @ readout)
        for place in places:
            want = pushed(weights, source, place, layers)[4] @ readout
            assert found.layers[place[0]][place[1:]] == pytest.approx(want, rel=1e-6, abs=1e-9)
    number, head, key = places[0]
    frame = found.to_frame()
    row = frame[(frame["layer"] == number) & (frame["head"] == head) & (frame["key"] == key)]
    assert row.loading.item() == pytest.approx(found.layers[number][head, key])
    assert found.bypass[number] == pytest.approx(found.total - frame[frame["layer"] == number].loading.sum())


def test_loadings_are_pushes_through_one_head_and_key(llama: Checkpoint) -> None:
    check_against_pushes(read_weights(llama), 1, [(2, 5, 1), (1, 0, 1), (3, 7, 4), (3, 2, 2)])


def test_an_induction_head_carries_the_token(model: Checkpoint) -> None:
    tokens = np.tile(np.random.default_rng(0).permutation(128)[:30], 2)
    contributions = logit_contributions(freeze(model, tokens), int(tokens[41]), position=40)
    found = head_loadings(contributions, 11)
    assert "1.2" in repr(found).splitlines()[2]
    assert found.layers[1][:, 11].sum() > 0.8 * found.total
    assert "from position 11 to position 40" in repr(found)


def test_refusals(llama: Checkpoint) -> None:
    contributions = logit_contributions(freeze(llama, TOKENS), 9)
    with refused(TypeError, "head_loadings: contributions must be LogitContributions, got FrozenModel"):
        head_loadings(contributions.model, 0)  # type: ignore[arg-type]
    with refused(ValueError, "head_loadings: source must lie between 0 and 5, got 6"):
        head_loadings(contributions, 6)
    with refused(ValueError, "head_loadings: layer must lie between 0 and 3, got 4"):
        head_loadings(contributions, 0, layer=4)
    with refused(ValueError, "head_loadings: vector must be real, (128,), got float64 of shape (3,)"):
        head_loadings(contributions, 0, vector=np.ones(3))
    with refused(ValueError, "head_loadings: through must be 'heads' or 'all', got 'mlp'"):
        head_loadings(contributions, 0, through="mlp")  # type: ignore[arg-type]


@pytest.mark.slow
def test_loadings_of_a_language_model() -> None:
    folder = smollm2()
    if folder is None:
        pytest.skip("SmolLM2 is made by python -m benchmarks.smollm2")
    check_against_pushes(read_weights(open_checkpoint(folder)), 20, [(23, 3, 1), (29, 1, 4)])
