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
from tnlib_adapters.attention.softmax import log_softmax
from tnlib_adapters.circuits import logit_contributions, order_losses, path_orders, strongest_paths
from tnlib_adapters.circuits.paths import strongest_paths as strongest
from tnlib_adapters.circuits.paths.order_losses import streams_by_order
from tnlib_adapters.circuits.paths.path_energies import norm_bound, path_energies
from tnlib_adapters.circuits.paths.path_layers import PathLayer, streams_of_one_head
from tnlib_adapters.reference.model import loss

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
@pytest.mark.parametrize("feed_forward", ["secant", "jacobian"])
def test_streams_by_order_have_the_orders_of_every_readout(name: str, feed_forward: str, tmp_path: Path) -> None:
    found = contributions_of(name, tmp_path, feed_forward=feed_forward)
    for counted in ("heads", "all"):
        sums = np.cumsum(streams_by_order(found.model, counted), axis=0)
        norm, within = found.model.final_norm, path_orders(found, counted).within
        hidden = sums if norm is None else np.stack([norm.apply(part) for part in sums])
        assert np.allclose(hidden[:, found.position] @ found.vector, within, atol=1e-5 * np.abs(within).max())


@each
def test_losses_are_those_of_the_streams(name: str, tmp_path: Path) -> None:
    model = contributions_of(name, tmp_path).model
    losses, streams = order_losses(model), streams_by_order(model, "heads")
    mask = np.arange(len(TOKENS)) > 0
    assert losses.loss == pytest.approx(loss(open_checkpoint(tmp_path), TOKENS, mask), rel=1e-5)
    for order in (0, 1):
        for stream, value in (
            (streams[: order + 1].sum(axis=0), losses.up_to),
            (sum_without(streams, order), losses.without),
        ):
            log_p = log_softmax(model.unembed(stream if model.final_norm is None else model.final_norm.apply(stream)))
            assert value[order] == pytest.approx(-log_p[np.arange(len(TOKENS) - 1), TOKENS[1:]].mean(), rel=1e-5)
    assert np.abs(losses.up_to[losses.order_within(0.01) :] - losses.loss).max() <= 0.01
    assert "nats from order" in repr(losses)


def sum_without(streams: np.ndarray, order: int) -> np.ndarray:
    return np.delete(streams, order, axis=0).sum(axis=0)


@each
def test_paths_are_those_of_the_frozen_layers_one_by_one(name: str, tmp_path: Path) -> None:
    found = contributions_of(name, tmp_path)
    orders = path_orders(found)
    paths = strongest_paths(found, 10**6)
    assert len(paths.paths) == len(set(paths.paths)) == paths.n_paths
    assert paths.bound == 0
    for order, wanted in enumerate(orders.embedding):
        values = [v for path, v in zip(paths.paths, paths.values, strict=True) if len(path) == order]
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


@pytest.mark.parametrize("k", [1, 20, 1000])
def test_the_strongest_of_any_order_come_first(k: int, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = logit_contributions(freeze(llama, TOKENS), 9)
    every, some = strongest_paths(found, 10**6), strongest_paths(found, k)
    assert np.array_equal(np.abs(every.values), np.sort(np.abs(every.values))[::-1])
    assert some.paths == every.paths[:k]
    assert some.bound == pytest.approx(abs(every.values[k - 1]))
    monkeypatch.setattr(strongest, "MOST_SUFFIXES", 3)
    few = strongest_paths(found, k)
    listed = set(few.paths)
    others = [abs(v) for path, v in zip(every.paths, every.values, strict=True) if path not in listed]
    assert max(others) <= few.bound * (1 + 1e-12)
    assert "all others sum to" in repr(few)
    assert "within 1 %" in repr(path_orders(found, "all"))


@each
def test_energies_bound_the_sum_of_squares(name: str, tmp_path: Path) -> None:
    found = contributions_of(name, tmp_path)
    layers = [PathLayer.of(block) for block in found.model.blocks]
    streams = list(streams_of_one_head(layers, found.model.embedding))
    *_, last = path_energies(layers, streams)
    for layer in (layer for layer in layers if layer.others):
        x = normal((3, *found.model.embedding.shape), seed=2)
        matrices = np.einsum("mni,nij->mnj", x, layer.maps())
        assert np.allclose(matrices, layer.around(x), rtol=0, atol=1e-5 * np.abs(matrices).max())
    readout = np.zeros_like(found.model.embedding)
    readout[found.position] = found.vector
    readout = readout if found.model.final_norm is None else found.model.final_norm.adjoint(readout)
    paths = strongest_paths(found, 10**6)
    squares = {n: sum(v**2 for p, v in zip(paths.paths, paths.values, strict=True) if len(p) == n) for n in range(9)}
    bound, exact = norm_bound(readout[None], last.streams)[0] ** 2, squares[2]
    assert exact * (1 - 1e-5) <= sum(list(squares.values())[2:]) <= bound * (1 + 1e-5)
    if not any(squares[n] for n in range(3, 9)):  # at one position the second moments of two heads are exact
        assert bound == pytest.approx(exact, rel=1e-4)


def test_texts_that_do_not_fit_are_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = logit_contributions(freeze(llama, TOKENS), 9)
    with refused(ArgumentError, "counted"):
        path_orders(found, "layers")
    with refused(ArgumentError, "k"):
        strongest_paths(found, 0)
    with refused(ArgumentError, "order_losses: counted"):
        order_losses(found.model, "layers")  # type: ignore[arg-type]
    with refused(TypeError, "order_losses: model must be a FrozenModel"):
        order_losses(llama)
    with refused(ArgumentError, "on at least two tokens"):
        order_losses(freeze(llama, [5]))
    monkeypatch.setattr(strongest, "MOST_BYTES", 1000)
    with refused(ArgumentError, "freeze a text of at most"):
        strongest_paths(found)
