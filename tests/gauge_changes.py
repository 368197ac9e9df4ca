"""Changes of gauge: scales and invertible matrices of formats, and of the heads of layers and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracles
from attention_layers import ARRAYS
from oracles import with_spectrum
from tnlib_adapters import Attention, Checkpoint, HeadNorm, Rotary
from tnlib_adapters.checkpoints.modified import with_tensors
from tnlib_adapters.factors.projections import Projections, put_together

SCALES = {"float32": (1.0, 1e-15, 1e15), "float64": (1.0, 1e-150, 1e150)}


def real(dtype: np.dtype) -> np.dtype:
    return np.zeros(0, dtype).real.dtype


def scales(dtype: np.dtype) -> tuple[float, ...]:
    return SCALES[real(dtype).name]


def invertible(n: int, dtype: Any, seed: int, condition: float = 10.0) -> np.ndarray:
    """A matrix with singular values from 1 to `condition`."""
    return oracles.with_spectrum(np.geomspace(condition, 1, n), n, n, np.result_type(dtype, np.float64), seed)


def assert_alike(a: Any, b: Any, factor: float) -> None:
    """The same arrays but for `factor` eps of the norm of each."""
    assert type(a) is type(b)
    for one, other in zip(a.arrays(), b.arrays(), strict=True):
        oracles.assert_close(one, other, a.dtype, factor)


def well_conditioned(n: int, rng: np.random.Generator) -> np.ndarray:
    """Any matrix whose condition is 4."""
    return with_spectrum(np.geomspace(2, 0.5, n), n, n, seed=int(rng.integers(1 << 30)))


def commuting(rotary: Rotary | None, d_head: int, rng: np.random.Generator) -> np.ndarray:
    """A matrix G (d_head, d_head) that commutes with the rotations of a head, of all frequencies their own."""
    if rotary is None:
        return well_conditioned(d_head, rng)
    a, b = rotary.planes
    rest = np.setdiff1d(np.arange(d_head), [*a, *b])
    g = np.zeros((d_head, d_head))
    g[np.ix_(rest, rest)] = well_conditioned(len(rest), rng) if rest.size else 0
    z = rng.uniform(0.5, 2, len(a)) * np.exp(2j * np.pi * rng.uniform(size=len(a)))
    g[a, a], g[a, b], g[b, a], g[b, b] = z.real, z.imag, -z.imag, z.real
    return g


def other_gauge(layer: Attention, seed: int) -> Attention:
    """A layer that computes the same as this one, by all that goes unseen, heads in another order."""
    rng = np.random.default_rng(seed)
    group = layer.n_heads // layer.kv_heads
    new: dict[str, Any] = {
        name: None if (a := getattr(layer, name)) is None else a.astype(np.float64)
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "alibi")
    }
    if new["b_K"] is not None and layer.softcap is None and layer.head_norm is None:
        turning = 0 if layer.rotary is None else layer.rotary.n_columns
        new["b_K"][:, turning:] += rng.standard_normal(new["b_K"][:, turning:].shape)
    if new["b_V"] is not None and new["b_O"] is not None:
        more = rng.standard_normal(new["b_V"].shape)
        new["b_V"] += more
        new["b_O"] -= sum(more[h // group] @ new["W_O"][h] for h in range(layer.n_heads))
    norm = layer.head_norm
    for key in range(layer.kv_heads):
        h = well_conditioned(layer.d_value, rng)
        g = commuting(layer.rotary, layer.d_head, rng) if norm is None else signs(layer.rotary, layer.d_head, rng)
        heads = slice(key * group, (key + 1) * group)
        for which, at, of in (("Q", heads, g), ("K", key, np.linalg.inv(g).T), ("V", key, h)):
            new[f"W_{which}"][at] = new[f"W_{which}"][at] @ of
            if new[f"b_{which}"] is not None:
                new[f"b_{which}"][at] = new[f"b_{which}"][at] @ of
        new["W_O"][heads] = np.linalg.inv(h) @ new["W_O"][heads]
    if norm is not None and layer.rotary is not None:
        norm = _other_norm(new, norm, layer.rotary, rng)
    if layer.alibi is None and layer.relative_bias is None:
        keys = rng.permutation(layer.kv_heads)
        heads = np.concatenate([key * group + rng.permutation(group) for key in keys])
        for name, order in {"Q": heads, "O": heads, "K": keys, "V": keys}.items():
            new[f"W_{name}"] = new[f"W_{name}"][order]
            if name != "O" and new[f"b_{name}"] is not None:
                new[f"b_{name}"] = new[f"b_{name}"][order]
    typed = {name: None if a is None else a.astype(getattr(layer, name).dtype) for name, a in new.items()}
    return replace(layer, **typed, head_norm=norm)


def signs(rotary: Rotary | None, d_head: int, rng: np.random.Generator) -> np.ndarray:
    """A sign of every plane, and of every column that does not turn."""
    sign = rng.choice([-1.0, 1.0], d_head)
    if rotary is not None:
        a, b = rotary.planes
        sign[b] = sign[a]
    return np.diag(sign)


def _other_norm(new: dict[str, Any], norm: HeadNorm, rotary: Rotary, rng: np.random.Generator) -> HeadNorm:
    """Signs of the weights, lengths between the two of them, and quarter turns of some planes, in all heads."""
    a, b = rotary.planes
    weights = {"Q": norm.query.astype(np.float64), "K": norm.key.astype(np.float64)}
    turned = rng.choice([False, True], len(a))
    a, b = a[turned], b[turned]
    length = np.ones_like(weights["Q"])
    for f, (first, second) in enumerate(zip(*rotary.planes, strict=True)):
        length[[first, second]] = 2.0 ** (f - 1)
    for which, factor in (("Q", length), ("K", 1 / length)):
        sign = rng.choice([-1.0, 1.0], len(length))
        w = weights[which] * factor
        w[a], w[b] = w[b].copy(), w[a].copy()
        weights[which] = w * sign
        for name in (f"W_{which}", f"b_{which}"):
            if new[name] is not None:
                x = new[name]
                x[..., a], x[..., b] = x[..., b].copy(), -x[..., a]
                new[name] = x * sign
    return HeadNorm(weights["Q"].astype(norm.query.dtype), weights["K"].astype(norm.key.dtype), norm.eps)


def in_other_gauge(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    """A model with every layer in another gauge."""
    changes: dict[str, np.ndarray] = {}
    for k in range(checkpoint.n_layers):
        attention = checkpoint.wiring.layers[k].attention
        layer = other_gauge(checkpoint.attention(k), seed + k)
        weights = {n: np.concatenate(list(getattr(layer, f"W_{n.upper()}")), axis=1) for n in "qkv"}
        weights["o"] = np.concatenate(list(layer.W_O))
        biases = {n: b.ravel() for n in "qkvo" if (b := getattr(layer, f"b_{n.upper()}")) is not None}
        changes |= put_together(attention, Projections(weights, biases))
        if layer.head_norm is not None:
            stored = 1 if checkpoint.architecture.norm == "rms + 1" else 0
            of_norms = (layer.head_norm.query - stored, layer.head_norm.key - stored)
            names = [f"{attention.parent}.{n}.weight" for n in checkpoint.architecture.qk_norm or ()]
            changes |= dict(zip(names, of_norms, strict=True))
    return with_tensors(checkpoint, {name: (lambda value=value: value) for name, value in changes.items()})


def assert_equal_layers(one: Attention, other: Attention, rtol: float = 1e-9) -> None:
    """Equal arrays; a bias to as much as its weights are."""
    for name in ARRAYS:
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert oracles.norm(a - b) <= rtol * max(oracles.norm(b), oracles.norm(getattr(other, "W" + name[1:])))
    if one.head_norm is not None and other.head_norm is not None:
        np.testing.assert_allclose(one.head_norm.query, other.head_norm.query, rtol=rtol)
        np.testing.assert_allclose(one.head_norm.key, other.head_norm.key, rtol=rtol)
