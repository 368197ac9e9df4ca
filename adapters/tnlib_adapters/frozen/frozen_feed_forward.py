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
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.frozen.frozen_heads import FrozenNorm, pull_back
from tnlib_adapters.reference.layers import Affine, FeedForward, MixtureOfExperts, rows_product
from tnlib_adapters.reference.weights import Branch

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
    down_bias
        (d_model,) or (positions, d_model), added to the output, or None.
    positions
        Indices of the positions on which it acts, None for all.
    """

    maps: tuple[tuple[Affine, Array], ...]
    down: Array
    down_bias: Array | None
    positions: Array | None = None

    def linear(self, x: Array) -> Array:
        """Return the output at its positions for x (..., positions, d_model)."""
        hidden = np.asarray(sum((x @ affine.weight) * slopes for affine, slopes in self.maps))  # ... n [d] d_ff
        return np.asarray(hidden @ self.down)  # ... n [d_ff] d

    def biases(self, bias: Array | None) -> Array:
        """Return the output of the biases of the maps, of the input (d_model,) and of the down map.

        The result is (positions, d_model), or a scalar 0 if there are none.
        """
        hidden = [
            ((0 if bias is None else bias @ affine.weight) + (0 if affine.bias is None else affine.bias)) * slopes
            for affine, slopes in self.maps
            if not (bias is None and affine.bias is None)
        ]
        of_maps = sum(hidden) @ self.down if hidden else 0.0  # n [d_ff] d
        return np.asarray(of_maps if self.down_bias is None else of_maps + self.down_bias)

    def pull_back(self, y: Array, bias: Array | None) -> tuple[Array, Array]:
        """Return the adjoint of `linear` for y (..., positions, d_model), and <y, biases(bias)>, (...)."""
        hidden, x, of_biases = y @ self.down.T, np.zeros_like(y), np.zeros(y.shape[:-2])  # ... n [d] d_ff
        for affine, slopes in self.maps:
            sloped = hidden * slopes
            x += sloped @ affine.weight.T  # ... n [d_ff] d
            of_biases += 0.0 if affine.bias is None else sloped.sum(axis=-2) @ affine.bias
        of_biases += 0.0 if bias is None else x.sum(axis=-2) @ bias
        return x, of_biases if self.down_bias is None else of_biases + (y * self.down_bias).sum(axis=(-2, -1))

    def at(self, positions: Array) -> LocalFeedForward:
        """Return the map at some of all positions; `positions` of the result index them."""
        if self.positions is None:
            rows, indices = positions, None
        else:
            rows = np.flatnonzero(np.isin(self.positions, positions))
            indices = np.searchsorted(positions, self.positions[rows])
        by_position = self.down_bias is not None and self.down_bias.ndim == 2
        bias = self.down_bias[rows] if by_position and self.down_bias is not None else self.down_bias
        return LocalFeedForward(tuple((m, slopes[rows]) for m, slopes in self.maps), self.down, bias, indices)


@dataclass(frozen=True, eq=False, repr=False)
class FrozenFeedForward:
    """A feed-forward layer on one sequence as an affine map of the residual stream, norms around it included.

    Its output for the sequence itself is linear(x) + constant + remainder.

    Parameters
    ----------
    parts
        One linear map, or one for every expert.
    before, behind
        Norms of the input and of the output, or None.
    output
        (n, d_model): what the layer adds to the stream of the sequence.
    remainder
        (n, d_model): the part of the output that the linear map and the biases leave; None for the secant, where it is
        zero.
    """

    parts: tuple[LocalFeedForward, ...]
    before: FrozenNorm | None
    behind: FrozenNorm | None
    output: Array
    remainder: Array | None

    def __repr__(self) -> str:
        n, d = self.output.shape
        parts = f"{len(self.parts)} experts" if len(self.parts) > 1 else "one linear map per position"
        ends = "" if self.remainder is None else ", and a remainder"
        return f"FrozenFeedForward({parts} on {n} positions x {d} features, a constant{ends})"

    @cached_property
    def constant(self) -> Array:
        """(n, d_model): contribution of all biases."""
        like = np.zeros_like(self.output)
        constant = _scattered(self.parts, [part.biases(self._bias) for part in self.parts], like)
        return constant if self.behind is None else self.behind.apply(constant)

    @property
    def _bias(self) -> Array | None:
        """(d_model,), the bias of the norm before."""
        return None if self.before is None else self.before.bias

    def linear(self, x: Array) -> Array:
        """Return the linear part of the output, (..., n, d_model), for x (..., n, d_model)."""
        x = x if self.before is None else self.before.linear(x)
        y = _scattered(self.parts, [part.linear(_rows(part, x)) for part in self.parts], x)
        return y if self.behind is None else self.behind.linear(y)

    def matrices(self) -> Array:
        """Return the linear part at every position as a matrix that acts on rows, (n, d_model, d_model)."""
        n, d = self.output.shape
        x = np.eye(d, dtype=self.output.dtype)
        x = x if self.before is None else self.before.norm.centre(x) * self.before.norm.weight
        y = np.zeros((n, d, d), x.dtype)
        for part in self.parts:
            hidden = [x @ affine.weight for affine, _ in part.maps]  # the same at all positions
            for row, position in enumerate(range(n) if part.positions is None else part.positions):
                sloped = sum(u * slopes[row] for u, (_, slopes) in zip(hidden, part.maps, strict=True))
                y[position] += sloped @ part.down
        y = y if self.before is None else y / self.before.divisors[:, :, None]
        return y if self.behind is None else self.behind.linear(y.swapaxes(0, 1)).swapaxes(0, 1)

    def pull_back(self, y: Array) -> tuple[Array, Array]:
        """Return the adjoint of `linear` for y (..., n, d_model), and <y, constant>, (...)."""
        y, of_biases = pull_back(self.behind, y)
        pulled = [part.pull_back(_rows(part, y), self._bias) for part in self.parts]
        x = _scattered(self.parts, [adjoint for adjoint, _ in pulled], y)
        return x if self.before is None else self.before.adjoint(x), sum((value for _, value in pulled), of_biases)

    def at(self, position: int) -> FrozenFeedForward:
        """Return the layer at one position; an expert that does not read it acts on no positions."""
        here = slice(position, position + 1)
        before, behind = (None if norm is None else norm.at(here) for norm in (self.before, self.behind))
        parts = tuple(part.at(np.array([position])) for part in self.parts)
        remainder = None if self.remainder is None else self.remainder[here]
        return FrozenFeedForward(parts, before, behind, self.output[here], remainder)

    def apply(self, x: Array) -> Array:
        """Return linear(x) + constant + remainder for x (n, d_model)."""
        y = self.linear(x) + self.constant
        return y if self.remainder is None else y + self.remainder


def _rows(part: LocalFeedForward, x: Array) -> Array:
    return x if part.positions is None else x[..., part.positions, :]


def freeze_feed_forward(branch: Branch, stream: Array, local_map: LocalMap) -> FrozenFeedForward:
    """Return a feed-forward layer or experts at the values of one stream (n, d_model), norms included.

    Routing weights of experts are frozen too.
    """
    before, x = FrozenNorm.of(branch.before, stream)
    values = [_local_map(layer, x, weights, local_map) for layer, weights in _weighted_layers(branch.layer, x)]
    parts = tuple(value.part for value in values)
    behind, output = FrozenNorm.of(branch.behind, _scattered(parts, [value.output for value in values], x))
    remainder = None
    if local_map == "jacobian":
        remainder = _scattered(parts, [np.asarray(value.remainder) for value in values], x)
        remainder = remainder if behind is None else behind.linear(remainder)
    return FrozenFeedForward(parts, before, behind, output, remainder)


class _LocalValues(NamedTuple):
    """A linear map at some positions, and the remainder, None for the secant, and the output of the layer there."""

    part: LocalFeedForward
    remainder: Array | None
    output: Array


def _weighted_layers(layer: Any, x: Array) -> list[tuple[FeedForward, Array | None]]:
    """Return feed-forward layers with their weights (n,), None for weight 1 at all positions."""
    if not isinstance(layer, MixtureOfExperts):
        return [(layer, None)]
    weighted: list[tuple[FeedForward, Array | None]] = list(zip(layer.experts, layer.weights(x).T, strict=True))
    return weighted if layer.shared is None else [*weighted, (layer.shared, None)]


def _local_map(layer: FeedForward, x: Array, weights: Array | None, local_map: LocalMap) -> _LocalValues:
    """Return the linear map of a layer at x (n, d_model), times its weights."""
    positions = None if weights is None else np.flatnonzero(weights)
    factor = None if weights is None else weights[weights != 0][:, None]
    u = layer.up(x if positions is None else x[positions])  # n [d] d_ff
    maps: tuple[tuple[Affine, Array], ...]
    missing = None
    if layer.gate is None and local_map == "secant":
        slopes = _scaled(layer.activation.secant(u), factor)
        maps, hidden = ((layer.up, slopes),), np.multiply(slopes, u, out=u)
    elif layer.gate is None:
        slopes, hidden = _scaled(layer.activation.derivative(u), factor), _scaled(layer.activation(u), factor)
        maps, missing = ((layer.up, slopes),), hidden - slopes * u
    else:
        g = layer.gate(x if positions is None else x[positions])  # n [d] d_ff
        opened = _scaled(layer.activation(g), factor)
        maps = ((layer.up, opened),)
        if local_map == "jacobian":
            slopes = _scaled(layer.activation.derivative(g), factor) * u
            maps, missing = (*maps, (layer.gate, slopes)), -slopes * g
        hidden = np.multiply(opened, u, out=u)
    down, bias = layer.down.weight, layer.down.bias
    bias = None if bias is None else _scaled(bias, factor)
    output = rows_product(hidden, down)  # n [d_ff] d
    if bias is not None:
        output += bias
    return _LocalValues(
        LocalFeedForward(maps, down, bias, positions), None if missing is None else missing @ down, output
    )


def _scaled(x: Array, factor: Array | None) -> Array:
    return x if factor is None else np.asarray(factor * x)


def _scattered(parts: Sequence[LocalFeedForward], outputs: Sequence[Array], like: Array) -> Array:
    """Return the sum of outputs of parts at their positions, with the shape (..., n, d_model) of `like`."""
    if len(parts) == 1 and parts[0].positions is None and outputs[0].shape == like.shape:
        return outputs[0]
    total = np.zeros_like(like)
    for part, output in zip(parts, outputs, strict=True):
        total[..., slice(None) if part.positions is None else part.positions, :] += output
    return total
