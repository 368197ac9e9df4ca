"""Norms with frozen divisors: affine maps of the stream."""

from __future__ import annotations

from dataclasses import dataclass

from tnlib._typing import Array
from tnlib_adapters.reference.layers import Norm


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """LayerNorm or RMSNorm with the divisors of one sequence: x -> centre(x) / divisors * weight + bias.

    Parameters
    ----------
    norm
        The norm.
    divisors
        (n, 1), one for every position.
    """

    norm: Norm
    divisors: Array

    @classmethod
    def on(cls, norm: Norm, x: Array) -> FrozenNorm:
        """Return a norm with its divisors for the stream x (n, d_model)."""
        return cls(norm, norm.divisors(norm.centre(x)))

    @classmethod
    def of(cls, norm: Norm | None, x: Array) -> tuple[FrozenNorm | None, Array]:
        """Return a norm with its divisors for the stream x (n, d_model), and its output; None and x for no norm."""
        if norm is None:
            return None, x
        centred = norm.centre(x)
        divisors = norm.divisors(centred)
        return cls(norm, divisors), norm.scaled(centred, divisors)

    def at(self, positions: slice) -> FrozenNorm:
        """Return the norm at some positions."""
        return FrozenNorm(self.norm, self.divisors[positions])

    @property
    def bias(self) -> Array | None:
        """(d_model,), what is added at every position; None for RMSNorm."""
        return self.norm.bias

    def linear(self, x: Array) -> Array:
        """Return the linear part for x (..., n, d_model)."""
        y: Array = self.norm.centre(x) / self.divisors * self.norm.weight
        return y

    def adjoint(self, y: Array) -> Array:
        """Return the adjoint of `linear` for y (..., n, d_model); centring is a symmetric projection."""
        x: Array = self.norm.centre(y * self.norm.weight) / self.divisors
        return x

    def apply(self, x: Array) -> Array:
        """Return the affine map of x (n, d_model): for the stream of the divisors, the output of the norm."""
        y = self.linear(x)
        return y if self.bias is None else y + self.bias
