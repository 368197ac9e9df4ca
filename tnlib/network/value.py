"""A network of quimb as a stand-in for a dense array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.base import Dense
from tnlib.network.arguments import arrays_of, as_names, as_network
from tnlib.network.contraction import contract, mantissa
from tnlib.network.cost import find_path


@dataclass(frozen=True, eq=False, repr=False)
class Network(Dense):
    """The contraction of a TensorNetwork of quimb, of any form, with its legs in order.

    Parameters
    ----------
    tn
        The network. It is held, not copied.
    legs
        The names of its open indices, in the order of the legs of the dense array; by default `tn.outer_inds()`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `tn` is no network of finite arrays, or `legs` are not its open indices.

    Examples
    --------
    >>> import quimb.tensor as qtn, tnlib
    >>> peps = tnlib.network.Network(qtn.PEPS.rand(2, 2, bond_dim=3, seed=0))
    >>> peps.shape, peps.ranks, peps.n_parameters
    ((2, 2, 2, 2), (3, 3, 3, 3), 72)
    """

    tn: Any
    legs: Sequence[str] | None = None

    def __post_init__(self) -> None:
        as_network("Network", self.tn)
        there = tuple(self.tn.outer_inds())
        legs = there if self.legs is None else as_names("Network", "legs", self.legs)
        if set(legs) != set(there):
            raise ArgumentError(
                f"Network: legs must be all open indices of tn, got {', '.join(legs)} where {', '.join(there)} are "
                "open; contract what is not to stay open."
            )
        arrays_of("Network", list(self.tn.tensor_map.values()))
        object.__setattr__(self, "legs", legs)

    def arrays(self) -> tuple[Array, ...]:
        """Return the arrays of the tensors, in the order of the network."""
        return tuple(arrays_of("Network", list(self.tn.tensor_map.values())))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the open indices."""
        return tuple(self.tn.ind_size(i) for i in self.legs or ())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Sizes of the bonds, in the order of the network."""
        return tuple(self.tn.ind_size(i) for i in self.tn.inner_inds())

    def full(self) -> Array:
        """Contract to the dense array."""
        return contract(self.tn, legs=self.legs)

    def norm(self) -> float:
        """Frobenius norm, by contracting the network with its conjugate."""
        inner = {i: f"{i}*" for i in self.tn.inner_inds()}
        squared = self.tn & self.tn.conj().reindex(inner)
        square, twos = mantissa("Network.norm", squared, (), find_path("Network.norm", squared, ()))
        half, odd = divmod(twos, 2)
        root = math.sqrt(max(0.0, float(np.real(square)) * 2**odd))
        more = float(self.tn.exponent) * math.log2(10)
        whole = math.floor(more)
        try:
            return math.ldexp(root * 2.0 ** (more - whole), half + whole)
        except OverflowError:
            raise ArgumentError("Network.norm: the norm must lie below 1.8e308; lower tn.exponent.") from None
