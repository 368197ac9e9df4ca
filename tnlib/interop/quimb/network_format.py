"""A quimb network with an order of its legs, as a format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError
from tnlib._format import Format, numbered
from tnlib._typing import Array
from tnlib._validate import as_real
from tnlib.interop.quimb.contraction import contract, contract_scaled
from tnlib.interop.quimb.network_arguments import as_arrays, as_index_names, as_network, binary_exponent
from tnlib.linalg.scaling import Scaled


@dataclass(frozen=True, eq=False, repr=False)
class Network(Format):
    """The contraction of any quimb TensorNetwork `tn`, which is referenced, not copied.

    `legs` are the names of its open indices in the order of the legs of the dense array, by default `tn.outer_inds()`.

    Examples
    --------
    >>> import quimb.tensor as qtn
    >>> from tnlib.interop.quimb import Network
    >>> peps = Network(qtn.PEPS.rand(2, 2, bond_dim=3, seed=0))
    >>> peps.shape, peps.ranks, peps.n_parameters
    ((2, 2, 2, 2), (3, 3, 3, 3), 72)
    """

    tn: qtn.TensorNetwork
    legs: Sequence[str] | None = None

    def __post_init__(self) -> None:
        as_network("Network", self.tn)
        outer = tuple(self.tn.outer_inds())
        legs = outer if self.legs is None else as_index_names("Network", "legs", self.legs)
        if set(legs) != set(outer):
            raise ArgumentError(
                f"Network: legs must be all open indices of tn, got {', '.join(legs)} where {', '.join(outer)} are "
                "open; contract what is not to stay open."
            )
        as_arrays("Network", self.tn)
        object.__setattr__(self, "legs", legs)

    def named_arrays(self) -> dict[str, Array]:
        """Return the arrays of the tensors, in the order of the network."""
        return {f"tensors.{k}": a for k, a in enumerate(as_arrays("Network", self.tn))}

    def attributes(self) -> dict[str, Any]:
        """Return the legs, the exponent, and the indices and tags of all tensors."""
        tensors = [{"inds": list(tensor.inds), "tags": list(tensor.tags)} for tensor in self.tn]
        return {"legs": list(self.legs or ()), "exponent": float(self.tn.exponent), "tensors": tensors}

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Self:
        """Return the network with these tensors."""
        tensors = zip(numbered(arrays, "tensors"), attributes["tensors"], strict=True)
        tn = qtn.TensorNetwork([qtn.Tensor(a, names["inds"], names["tags"]) for a, names in tensors])
        tn.exponent = as_real("Network", "exponent", attributes["exponent"], "0.0")
        if not math.isfinite(tn.exponent):
            raise ArgumentError(f"Network: exponent must be finite, got {tn.exponent}; pass 0.0 for no scale.")
        return cls(tn, attributes["legs"])

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
        """Frobenius norm, from the contraction of the network with its conjugate.

        Raises ArgumentError where it leaves the range of float64.
        """
        square, exponent = contract_scaled("Network.norm", self.tn.make_norm(), ())
        half, odd = divmod(exponent, 2)
        factor, e = binary_exponent(self.tn)
        root = math.sqrt(max(0.0, float(square.real)) * 2**odd) * factor
        try:
            return float(Scaled(np.array(root), half + e).item().real)
        except OverflowError:
            raise ArgumentError("Network.norm: the norm must lie below 1.8e308; lower tn.exponent.") from None
