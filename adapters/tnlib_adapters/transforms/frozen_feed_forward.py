r"""Feed-forward layers on one sequence: a linear map for every position, plus a constant and an exact remainder.

With hidden values u = x W_up + b_up and, where there is a gate, g = x W_gate + b_gate, the layer is a(u) W_down or
(a(g) u) W_down. At the values of one sequence its linear map is x -> sum_k (x W_k * slopes_k) W_down with

    secant     a(u) = (a(u) / u) u    slopes a(u) / u;    with a gate a(g), of W_up
    jacobian   derivative at x        slopes a'(u);       with a gate a(g), of W_up, and a'(g) u, of W_gate

The biases add the constant sum_k (b_k * slopes_k) W_down + b_down. The remainder is the output less both: zero for the
secant, (a(u) - a'(u) u) W_down or -(a'(g) g u) W_down for the Jacobian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.reference.layers import Affine, Experts, FeedForward
from tnlib_adapters.reference.weights import Branch
from tnlib_adapters.transforms.frozen_norm import FrozenNorm

LocalMap = Literal["secant", "jacobian"]


@dataclass(frozen=True, eq=False)
class LocalFeedForward:
    """The linear map of one feed-forward layer, or of one expert, at some positions.

    Parameters
    ----------
    maps
        Affine maps (d_model, d_ff) that read the input, and their slopes (positions, d_ff).
    down
        (d_ff, d_model).
    positions
        Indices of the positions on which it acts, None for all.
    """

    maps: tuple[tuple[Affine, Array], ...]
    down: Array
    positions: Array | None = None

    def linear(self, x: Array) -> Array:
        """Return the output at its positions for x (..., positions, d_model)."""
        hidden = np.asarray(sum((x @ affine.weight) * slopes for affine, slopes in self.maps))  # ... n [d] d_ff
        return np.asarray(hidden @ self.down)  # ... n [d_ff] d

    def adjoint(self, y: Array) -> Array:
        """Return the adjoint of `linear` for y (..., positions, d_model)."""
        hidden = y @ self.down.T  # ... n [d] d_ff
        return np.asarray(sum((hidden * slopes) @ affine.weight.T for affine, slopes in self.maps))  # ... n [d_ff] d

    def of_biases(self, bias: Array | None) -> Array:
        """Return the output of the biases of the maps and of the input (d_model,), (positions, d_model) or 0."""
        hidden = [
            ((0 if bias is None else bias @ affine.weight) + (0 if affine.bias is None else affine.bias)) * slopes
            for affine, slopes in self.maps
            if not (bias is None and affine.bias is None)
        ]
        return np.asarray(sum(hidden) @ self.down if hidden else 0.0)  # n [d_ff] d


@dataclass(frozen=True, eq=False, repr=False)
class FrozenFeedForward:
    """A feed-forward layer on one sequence as an affine map of the residual stream, norms around it included.

    The output for the sequence itself is linear(x) + constant + remainder.

    Parameters
    ----------
    parts
        One linear map, or one for every expert.
    before, behind
        Norms of the input and of the output, or None.
    constant
        (n, d_model): contribution of all biases.
    remainder
        (n, d_model): the part of the output that the linear map and the biases leave; None for the secant, where it is
        zero.
    """

    parts: tuple[LocalFeedForward, ...]
    before: FrozenNorm | None
    behind: FrozenNorm | None
    constant: Array
    remainder: Array | None

    def __repr__(self) -> str:
        n, d = self.constant.shape
        parts = f"{len(self.parts)} experts" if len(self.parts) > 1 else "one linear map per position"
        ends = "" if self.remainder is None else ", and a remainder"
        return f"FrozenFeedForward({parts} on {n} positions x {d} features, a constant{ends})"

    def linear(self, x: Array) -> Array:
        """Return the linear part of the output, (..., n, d_model), for x (..., n, d_model)."""
        x = x if self.before is None else self.before.linear(x)
        y = _scattered(self.parts, [part.linear(_rows(part, x)) for part in self.parts], x)
        return y if self.behind is None else self.behind.linear(y)

    def adjoint(self, y: Array) -> Array:
        """Return the adjoint of `linear` for y (..., n, d_model)."""
        y = y if self.behind is None else self.behind.adjoint(y)
        x = _scattered(self.parts, [part.adjoint(_rows(part, y)) for part in self.parts], y)
        return x if self.before is None else self.before.adjoint(x)

    def apply(self, x: Array) -> Array:
        """Return linear(x) + constant + remainder for x (n, d_model)."""
        y = self.linear(x) + self.constant
        return y if self.remainder is None else y + self.remainder


def _rows(part: LocalFeedForward, x: Array) -> Array:
    return x if part.positions is None else x[..., part.positions, :]


def freeze_feed_forward(branch: Branch, stream: Array, local_map: LocalMap) -> tuple[FrozenFeedForward, Array]:
    """Return a feed-forward layer or experts at the values of one stream (n, d_model), and the output, norms included.

    Routing weights of experts are frozen too.
    """
    before = None if branch.before is None else FrozenNorm.on(branch.before, stream)
    x = stream if before is None else before.apply(stream)
    bias = None if before is None else before.bias
    values = [_local_map(layer, x, weights, bias, local_map) for layer, weights in _weighted_layers(branch.layer, x)]
    parts = tuple(value.part for value in values)
    constant, remainder, output = (
        _scattered(parts, [getattr(value, name) for value in values], x) for name in ("constant", "remainder", "output")
    )
    behind = None if branch.behind is None else FrozenNorm.on(branch.behind, output)
    if behind is not None:
        constant, remainder, output = behind.apply(constant), behind.linear(remainder), behind.apply(output)
    return FrozenFeedForward(parts, before, behind, constant, None if local_map == "secant" else remainder), output


class _LocalValues(NamedTuple):
    """A linear map at some positions, and what the biases, the remainder and the layer itself give there."""

    part: LocalFeedForward
    constant: Array
    remainder: Array
    output: Array


def _weighted_layers(layer: Any, x: Array) -> list[tuple[FeedForward, Array | None]]:
    """Return feed-forward layers with their weights (n,), None for weight 1 at all positions."""
    if not isinstance(layer, Experts):
        return [(layer, None)]
    weighted: list[tuple[FeedForward, Array | None]] = list(zip(layer.experts, layer.weights(x).T, strict=True))
    return weighted if layer.shared is None else [*weighted, (layer.shared, None)]


def _local_map(
    layer: FeedForward, x: Array, weights: Array | None, bias: Array | None, local_map: LocalMap
) -> _LocalValues:
    """Return the linear map of a layer at x (n, d_model), times its weights; `bias` is the part of x of the norm."""
    positions = None if weights is None else np.flatnonzero(weights)
    factor = np.ones((), x.dtype) if weights is None else weights[weights != 0][:, None]
    read = x if positions is None else x[positions]
    u = layer.up(read)  # n [d] d_ff
    maps: tuple[tuple[Affine, Array], ...]
    if layer.gate is None:
        hidden = factor * layer.activation(u)
        slopes = layer.activation.secant(u) if local_map == "secant" else layer.activation.derivative(u)
        maps, missing = ((layer.up, factor * slopes),), hidden - factor * slopes * u
    else:
        g = layer.gate(read)  # n [d] d_ff
        opened = factor * layer.activation(g)
        maps, hidden, missing = ((layer.up, opened),), opened * u, np.zeros_like(u)
        if local_map == "jacobian":
            slopes = factor * layer.activation.derivative(g) * u
            maps, missing = (*maps, (layer.gate, slopes)), -slopes * g
    down, last = layer.down.weight, 0 if layer.down.bias is None else factor * layer.down.bias
    part = LocalFeedForward(maps, down, positions)
    remainder = np.zeros_like(read) if local_map == "secant" else missing @ down  # n [d_ff] d
    return _LocalValues(part, part.of_biases(bias) + last, remainder, hidden @ down + last)


def _scattered(parts: Sequence[LocalFeedForward], outputs: Sequence[Array], like: Array) -> Array:
    """Return the sum of outputs of parts at their positions, with the shape (..., n, d_model) of `like`."""
    if len(parts) == 1 and parts[0].positions is None and outputs[0].shape == like.shape:
        return outputs[0]
    total = np.zeros_like(like)
    for part, output in zip(parts, outputs, strict=True):
        total[..., slice(None) if part.positions is None else part.positions, :] += output
    return total
