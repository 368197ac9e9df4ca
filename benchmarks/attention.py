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


HEADS = (
    Entry(
        "tnlib",
        "tnlib_adapters.attention.stacks:cores",
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
