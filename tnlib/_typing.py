"""Type aliases, and the part of every format that a `Fit` reports."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
MaxRank: TypeAlias = int | tuple[int, ...] | None  # cap of all ranks, or of every bond
Caps: TypeAlias = int | tuple[int | None, ...] | None  # as MaxRank, or of some legs only


class SlicedArray(Protocol):
    """An array that is read by slices: a zarr array, an h5py dataset."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of entries along every leg."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the entries."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return the part that a tuple of slices selects, as an array."""


class FormatProtocol(Protocol):
    """A tensor in factored form; see `tnlib._format.Format`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Common dtype of the stored arrays."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Sizes of the inner legs."""

    @property
    def n_parameters(self) -> int:
        """Number of stored numbers."""

    def is_subnormal(self) -> bool:
        """Test if rounding of entries is not relative, because they are too small."""
