"""Parts of a logit by the length of paths, and single paths, in every architecture."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import architecture_models
import numpy as np
import pytest
import transformers as tf
from oracles import normal, refused
from tnlib_adapters import freeze, open_checkpoint
from tnlib_adapters.circuits import logit_contributions, path_orders, strongest_paths
from tnlib_adapters.circuits.paths import strongest_paths as strongest

from tnlib import ArgumentError

ARCHITECTURES = ["gpt2", "gptj", "gpt_neox", "opt_after", "llama_biases", "gemma2", "bloom", "mixtral", "deepseek_v3"]
TOKENS = np.arange(6) + 2


def contributions_of(name: str, folder: Path, **options: Any) -> Any:
    tf.set_seed(0)
    architecture_models.MODELS[name]().save_pretrained(folder)
    frozen = freeze(open_checkpoint(folder), TOKENS, **options)
    return logit_contributions(frozen, direction=normal(frozen.embedding.shape[1:], seed=1), position=4)


each = pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in architecture_models.MODELS])


@each
@pytest.mark.parametrize("feed_forward", ["secant", "jacobian"])
def test_orders_sum_to_the_readout(name: str, feed_forward: str, tmp_path: Path) -> None:
    found = contributions_of(name, tmp_path, feed_forward=feed_forward)
    size = np.abs(found.through).max()
    for counted in ("heads", "all"):
        orders = path_orders(found, counted)
        assert abs(orders.total - found.total) <= 1e-5 * max(size, np.abs(orders.values).max())
        assert orders.embedding.sum() == pytest.approx(found.by_position.sum(), abs=1e-4 * size)
        assert orders.within[orders.order_within(0.01)] == pytest.approx(orders.total, rel=0.01)


@each
def test_paths_are_those_of_the_frozen_layers_one_by_one(name: str, tmp_path: Path) -> None:
    found = contributions_of(name, tmp_path)
    orders = path_orders(found)
    paths = strongest_paths(found, 10**6)
    assert len(paths.paths) == len(set(paths.paths)) == paths.n_compared
    for order in range(4):
        values = [v for path, v in zip(paths.paths, paths.values, strict=True) if len(path) == order]
        wanted = orders.embedding[order] if order < len(orders.embedding) else 0.0
        assert sum(values) == pytest.approx(wanted, abs=1e-5 * np.abs(paths.values).max() * max(1, len(values)))
    for path, value in itertools.islice(zip(paths.paths, paths.values, strict=True), 0, None, 7):
        assert value == pytest.approx(value_of(found, path), abs=2e-5 * np.abs(paths.values).max())


def value_of(found: Any, path: tuple[str, ...]) -> float:
    """A path followed through the layers of the frozen model."""
    x, model = found.model.embedding, found.model
    for block in model.blocks:
        own = [
            (n, int(head.rpartition(".")[2])) for head in path for n in [head.rpartition(".")[0]] if n in block.names
        ]
        if own:
            ((layer, head),) = own
            term = block.layers[block.names.index(layer)].terms
            y = term.left[head] @ x @ term.right[head].full().T
        else:
            y = x + sum(
                layer.linear(x) for layer, heads in zip(block.layers, block.heads, strict=True) if heads is None
            )
        x = y if block.after is None else block.after.linear(y)
    x = x if model.final_norm is None else model.final_norm.linear(x)
    return float(x[found.position] @ found.vector)


def test_the_strongest_come_first(llama: Any) -> None:
    found = logit_contributions(freeze(llama, TOKENS), 9)
    every, some = strongest_paths(found, 10**6), strongest_paths(found, 20)
    assert np.array_equal(np.abs(every.values), np.sort(np.abs(every.values))[::-1])
    assert some.paths == every.paths[:20]
    assert "longer paths sum to" in repr(some)
    assert "within 1 %" in repr(path_orders(found, "all"))


def test_texts_that_do_not_fit_are_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = logit_contributions(freeze(llama, TOKENS), 9)
    with refused(ArgumentError, "counted"):
        path_orders(found, "layers")
    with refused(ArgumentError, "k"):
        strongest_paths(found, 0)
    monkeypatch.setattr(strongest, "MOST_BYTES", 1000)
    with refused(ArgumentError, "freeze a text of at most"):
        strongest_paths(found)
