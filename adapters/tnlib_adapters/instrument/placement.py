"""Device and dtype of a running model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tnlib import ArgumentError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Placement:
    """Device and dtype of the weights of a running model."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    dtype: torch.dtype = torch.float32

    def place(self, value: Tensor) -> Tensor:
        """Return a weight or buffer on the device; floats in the dtype."""
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)


def placement_of(function: str, device: str, dtype: str) -> Placement:
    """Return the placement of these names, such as "cuda:0" and "bfloat16".

    Raises
    ------
    ArgumentError
        If torch does not reach the device, or the dtype is not one of `DTYPES`.
    """
    if dtype not in DTYPES:
        names = ", ".join(map(repr, DTYPES))
        raise ArgumentError(f"{function}: dtype must be one of {names}, got {dtype!r}.")
    try:
        torch_device = torch.device(device)
        torch.zeros(1, device=torch_device).cpu()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(
            f"{function}: device must be one that torch computes on here, such as 'cpu', got {device!r} "
            f"({str(error).splitlines()[0]}); name another, or leave it out."
        ) from error
    return Placement(torch_device, DTYPES[dtype])
