"""Networks as a format, their copy tensors and isometric tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._format import Format
from tnlib._stored_arrays import MAX_NDIM, fits_in_memory, numbered
from tnlib._typing import Array
from tnlib._validate import as_array, as_legs, as_real
from tnlib.interop.quimb.contraction import contract, contract_scaled
from tnlib.interop.quimb.network_arguments import as_arrays, as_index_names, as_network, binary_exponent, common_dtype
from tnlib.linalg import orthogonal
from tnlib.linalg.multilinear import matrix_from
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


def spell_out(tn: qtn.TensorNetwork) -> qtn.TensorNetwork:
    """Return the same network with a copy tensor in place of every index that joins three or more tensors.

    Most algorithms for networks accept only bonds between two tensors. In the networks of a CP, an SVD or a Vidal
    diagonal tensors are vectors on such a hyperindex. The copy tensors have the tag DELTA, and these indices new names.
    Unlike quimb's `hyperinds_resolve` it accepts half precision, and raises ArgumentError where a copy tensor does not
    fit into memory.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import spell_out, to_network
    >>> tn = to_network(tnlib.CP(np.ones(2), [np.ones((3, 2))] * 4))
    >>> tn.num_tensors, spell_out(tn)["DELTA"].shape
    (5, (2, 2, 2, 2, 2))
    """
    out = as_network("spell_out", tn).copy()
    for index, ids in tn.ind_map.items():
        if len(ids) < 3:
            continue
        size, dtype = tn.ind_size(index), common_dtype(tn.tensor_map[tid] for tid in ids)
        if len(ids) > MAX_NDIM or not fits_in_memory(size ** len(ids), dtype):
            raise ArgumentError(
                f"spell_out: every copy tensor must have at most {MAX_NDIM} legs and fit into memory, got index "
                f"{index} of size {size} on {len(ids)} tensors; use tn.hyperinds_resolve('tree') instead."
            )
        ends = [qtn.rand_uuid() for _ in ids]
        for tid, end in zip(sorted(ids), ends, strict=True):
            out.tensor_map[tid].reindex_({index: end})
        out |= qtn.COPY_tensor(size, ends, "DELTA", dtype=dtype.name)
    return out


def isometry_error(a: Array | qtn.Tensor, legs: int | str | Sequence[int] | Sequence[str]) -> float:
    """Return the Frobenius norm of :math:`Q^H Q - 1`, Q the matrix of `a` from the group `legs` to its other legs.

    It is at least 1 where the other legs have fewer entries than `legs`.

    Parameters
    ----------
    a
        An array, or a quimb Tensor.
    legs
        Some, not all, legs of `a`: leg numbers of an array, names of indices of a Tensor.

    Examples
    --------
    >>> import numpy as np
    >>> isometry_error(np.eye(3)[:, :2], 1), isometry_error(np.eye(3)[:, :2], 0)
    (0.0, 1.0)
    """
    return orthogonal.isometry_error(_as_matrix("isometry_error", a, legs))


def is_isometry(a: Array | qtn.Tensor, legs: int | str | Sequence[int] | Sequence[str]) -> bool:
    """Test if `isometry_error(a, legs)`, of the same arguments, is roundoff: 10,000 eps times the root of the columns.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> u, s, vh = tnlib.svd(np.arange(24.0).reshape(2, 3, 4), left=(0, 1)).value
    >>> u.shape, is_isometry(u, 2), is_isometry(2 * u, 2), is_isometry(vh, 0)
    ((2, 3, 2), True, False, True)
    """
    return orthogonal.is_isometry(_as_matrix("is_isometry", a, legs))


def _as_matrix(function: str, a: Any, legs: Any) -> Array:
    """Return `a` as a matrix (other legs, legs)."""
    is_tensor = hasattr(a, "inds")
    data = as_array(function, "a", a.data if is_tensor else a)
    if is_tensor:
        names = (legs,) if isinstance(legs, str) else legs
        if not isinstance(names, Sequence) or not all(isinstance(i, str) for i in names):
            raise ArgumentTypeError(
                f"{function}: legs must be names of indices, got {names!r}; pass some of {', '.join(a.inds)}."
            )
        if unknown := [i for i in names if i not in a.inds]:
            raise ArgumentError(
                f"{function}: legs must name indices of the tensor, got {unknown[0]}; there are {', '.join(a.inds)}."
            )
        legs = [a.inds.index(i) for i in names]
    return matrix_from(data, as_legs(function, "legs", legs, data.ndim))
