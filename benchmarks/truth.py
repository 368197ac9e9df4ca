"""True errors, from raw arrays alone: what a library says of its own result is not asked.

A result is a list of arrays in one of four layouts:

    train    cores (r[k], n[k], r[k+1])
    tucker   core, then factors (n[k], r[k])
    cp       weights (R,), then factors (n[k], R)
    svd      u (m, r), s (r,), vh (r, n)
    number   one array, of one entry or of several
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Arrays = Sequence[np.ndarray]


def full(layout: str, arrays: Arrays) -> np.ndarray:
    """Multiply out, in the precision of the arrays."""
    layouts = {"train": _full_train, "tucker": _full_tucker, "cp": _full_cp, "svd": _full_svd, "number": lambda a: a[0]}
    return layouts[layout](arrays)


def error(layout: str, x: Any, arrays: Arrays) -> float:
    """Relative Frobenius error of a result; `x` is the dense array, the cores of the train that was rounded, or a Pair.

    What is to come out of a pair is made here, as long as its ranks are.
    """
    if hasattr(x, "answer"):
        x = x.answer(x.a, x.b)
    if not isinstance(x, np.ndarray):
        return train_distance(x, arrays) / train_distance(x, [np.zeros((1, n, 1)) for _, n, _ in map(np.shape, x)])
    x = x.astype(np.result_type(x.dtype, np.float64), copy=False)
    return float(np.linalg.norm(x - full(layout, arrays)) / np.linalg.norm(x))


def ranks(layout: str, arrays: Arrays) -> tuple[int, ...]:
    if layout == "train":
        return (*(len(core) for core in arrays), arrays[-1].shape[2])
    return arrays[0].shape if layout == "tucker" else (arrays[0].shape[-1],)


def stored(arrays: Arrays) -> int:
    return sum(a.size for a in arrays)


def train_distance(a: Arrays, b: Arrays) -> float:
    """Norm of the difference of two trains, from triangular factors of the difference train: no square loses digits."""
    t = np.array([[1.0, -1.0]])  # p (ra rb)
    for core_a, core_b in zip(a, b, strict=True):
        split = len(core_a)
        ta = np.tensordot(t[:, :split], core_a, 1)  # p [ra] n ra'
        tb = np.tensordot(t[:, split:], core_b, 1)  # p [rb] n rb'
        both = np.concatenate([ta, tb], axis=2)  # p n (ra' rb')
        t = np.linalg.qr(both.reshape(-1, both.shape[2]), mode="r")
    return float(np.linalg.norm(t.sum(axis=1)))


def _full_train(cores: Arrays) -> np.ndarray:
    """Contract both halves first: from one end alone, the last step would hold r times the result."""
    half = len(cores) // 2
    left, right = cores[0], cores[-1]
    for core in cores[1:half]:
        left = np.tensordot(left, core, 1)  # 1 n ... [r] n r'
    for core in cores[half:-1][::-1]:
        right = np.tensordot(core, right, 1)  # r n [r'] n ... 1
    if half == 0:
        return right[0, ..., 0]
    shape = left.shape[1:-1] + right.shape[1:-1]
    return (left.reshape(-1, left.shape[-1]) @ right.reshape(len(right), -1)).reshape(shape)


def _full_tucker(arrays: Arrays) -> np.ndarray:
    x, *factors = arrays
    for factor in factors:
        x = np.tensordot(x, factor, (0, 1))  # [r0] r1 ... n0: every mode in turn is the first one
    return x


def _full_cp(arrays: Arrays) -> np.ndarray:
    weights, first, *others = arrays
    rest = np.ones((1, len(weights)))
    for factor in others:
        rest = (rest[:, None] * factor).reshape(-1, len(weights))  # (n n') R
    return ((first * weights) @ rest.T).reshape([len(f) for f in arrays[1:]])  # n [R] (n n')


def _full_svd(arrays: Arrays) -> np.ndarray:
    u, s, vh = arrays
    return (u * s) @ vh  # m [r] n


def block_sum(a: Arrays, b: Arrays) -> list[np.ndarray]:
    """Cores of the sum of two trains."""
    cores = []
    for k, (one, other) in enumerate(zip(a, b, strict=True)):
        (l, n, r), (m, _, s) = one.shape, other.shape
        core = np.zeros((l + m, n, r + s))
        core[:l, :, :r], core[l:, :, r:] = one, other
        core = core.sum(axis=0, keepdims=True) if k == 0 else core
        cores.append(core.sum(axis=2, keepdims=True) if k == len(a) - 1 else core)
    return cores


def core_product(a: Arrays, x: Arrays) -> list[np.ndarray]:
    """Cores of an operator times a train, as wide as the product of both."""
    wide = [np.einsum("lmnr,jnk->ljmrk", one, other) for one, other in zip(a, x, strict=True)]  # l j m [n] r k
    return [core.reshape(len(core) * core.shape[1], core.shape[2], -1) for core in wide]


def inner_product(a: Arrays, b: Arrays) -> np.ndarray:
    """The sum over all legs of a b, in an array of one entry."""
    met = np.ones((1, 1))
    for one, other in zip(a, b, strict=True):
        half = np.tensordot(met, other, 1)  # l [j] n k
        met = np.tensordot(one, half, ([0, 1], [0, 1]))  # [l n] r k
    return met[0]


def singular_values(weights: Arrays, _: Arrays) -> np.ndarray:
    """Those of W_Q W_K^T and W_V W_O of every head, (2, heads, d_head), from triangular factors in double precision."""
    q, k, v, o = (w.astype(np.float64) for w in weights)
    group = len(q) // len(k)
    pairs = [[(q[h], k[h // group]) for h in range(len(q))], [(v[h // group], o[h].T) for h in range(len(q))]]
    triangles = [[[np.linalg.qr(w, mode="r") for w in pair] for pair in kind] for kind in pairs]
    return np.array([[np.linalg.svd(a @ b.T, compute_uv=False) for a, b in kind] for kind in triangles])


def compositions(weights: Arrays, _: Arrays) -> np.ndarray:
    """K-composition ||W_V W_O W_K W_Q^T|| / (||W_V W_O|| ||W_K W_Q^T||) of a head and one in a later layer."""
    q, k, v, o = (w.astype(np.float64) for w in weights)
    layers, heads = q.shape[:2]
    pairs = [np.linalg.qr(a, mode="r") for a in (v, q)]  # layer head r r
    left, right = pairs[0] @ o, k @ pairs[1].swapaxes(2, 3)  # ... r d, ... d r
    sizes = [np.linalg.norm(a, axis=(2, 3)) for a in (left, right)]
    scores = np.zeros((layers, heads, layers, heads))
    for i, g in np.ndindex(layers, heads):
        for j in range(i + 1, layers):
            met = np.linalg.norm(left[i, g] @ right[j], axis=(1, 2))
            scores[i, g, j] = met / sizes[0][i, g] / sizes[1][j]
    return scores


def best_gaussian(noise: float, n_entries: int, n_free: int) -> float:
    """Expected error of the best fit of a model with `n_free` parameters to its own tensor plus Gaussian noise."""
    return noise / math.hypot(1, noise) * math.sqrt(1 - n_free / n_entries)
