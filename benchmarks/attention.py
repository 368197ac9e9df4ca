"""The registry's part on attention: the singular values of every operator of a layer, through its factors."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from benchmarks.cases import Case, Pair
from benchmarks.entry import Entry


def _tnlib_layer(x: Pair, _: Case) -> Any:
    attention = importlib.import_module("tnlib_adapters").Attention
    return attention(*x.a, scale=x.a[0].shape[2] ** -0.5)


def _tnlib_cores(cores: Any, layer: Any, _: Case) -> np.ndarray:
    return np.stack([np.linalg.svd(cores(layer, circuit).array, compute_uv=False) for circuit in ("qk", "ov")])


def _torch_layer(x: Pair, _: Case) -> Any:
    torch = importlib.import_module("torch")
    q, k, v, o = (torch.from_numpy(w) for w in x.a)
    group = len(q) // len(k)
    return q, k.repeat_interleave(group, 0).mT, v.repeat_interleave(group, 0), o


def _factored_matrices(kind: Any, layer: Any, _: Case) -> np.ndarray:
    q, k, v, o = layer
    return np.stack([kind(q, k).S.numpy(), kind(v, o).S.numpy()])


def _tnlib_layers(x: Pair, _: Case) -> Any:
    attention = importlib.import_module("tnlib_adapters").Attention
    return [attention(*weights, scale=x.a[0].shape[3] ** -0.5) for weights in zip(*x.a, strict=True)]


def _torch_heads(x: Pair, _: Case) -> Any:
    torch = importlib.import_module("torch")
    kind = importlib.import_module("transformer_lens").FactoredMatrix
    q, k, v, o = (torch.from_numpy(np.ascontiguousarray(w)) for w in x.a)
    return kind(v, o), kind(k, q.mT)


def _torch_scores(scores: Any, pair: Any, _: Case) -> Any:
    torch = importlib.import_module("torch")
    found = scores(*pair)  # layer head layer head
    order = torch.arange(len(found))
    return torch.where(order[:, None, None, None] < order[:, None], found, 0.0)


COMPOSITION = (
    Entry(
        "tnlib",
        "tnlib_adapters.circuits:compositions",
        lambda compositions, layers, _: compositions(layers, "K"),
        lambda found: [np.nan_to_num(found.scores)],
        'compositions(layers, "K"); chance values included',
        prepare=_tnlib_layers,
    ),
    Entry(
        "TransformerLens",
        "transformer_lens.utilities.matrix:composition_scores",
        _torch_scores,
        lambda found: [found.numpy()],
        'what all_composition_scores("K") computes from the weights, composition_scores(OV, QK.T)',
        prepare=_torch_heads,
    ),
)

HEADS = (
    Entry(
        "tnlib",
        "tnlib_adapters.checkpoints.weight_stacks:cores",
        _tnlib_cores,
        lambda s: [s],
        "svd(cores(layer, 'qk'), compute_uv=False)",
        prepare=_tnlib_layer,
    ),
    Entry(
        "TransformerLens",
        "transformer_lens:FactoredMatrix",
        _factored_matrices,
        lambda s: [s],
        "FactoredMatrix(W_Q, W_K.mT).S, all heads at once",
        prepare=_torch_layer,
        exact=True,
    ),
)
