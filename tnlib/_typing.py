"""Type aliases, and what every format offers."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


class Format(Protocol):
    """A tensor held in fewer numbers: what formats share and reports read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array that the format stands for."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Common dtype of the stored arrays."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Sizes of the inner legs."""

    @property
    def n_parameters(self) -> int:
        """Count of stored numbers."""

    def full(self) -> Array:
        """Multiply out to the dense array."""

    def norm(self) -> float:
        """Frobenius norm."""
