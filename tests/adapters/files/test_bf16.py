"""bfloat16 against torch's own conversion, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from tnlib_adapters.files.safetensors_file import from_bf16, to_bf16

torch = pytest.importorskip("torch")

ALL = np.arange(2**16, dtype=np.uint16)


def is_nan(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFF) > 0x7F80


def assert_same(values: np.ndarray) -> None:
    """Which NaN comes of a NaN differs between the machines torch runs on: any will do."""
    got, want = to_bf16(values), torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert got.dtype == np.uint16
    np.testing.assert_array_equal(is_nan(got), np.isnan(values))
    np.testing.assert_array_equal(got[~is_nan(got)], want[~is_nan(got)])


def test_every_pattern_widens_as_torch_widens_it() -> None:
    want = torch.from_numpy(ALL).view(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(from_bf16(ALL).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_ties_and_their_neighbours_round_as_in_torch(low: int) -> None:
    """Every upper half, subnormals, infinities and NaN among them, with the lower half at a tie or beside it."""
    assert_same(((ALL.astype(np.uint32) << 16) | low).view(np.float32))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)])
def test_shapes_and_strides_are_kept(shape: tuple[int, ...]) -> None:
    values = np.full(shape, 1.5, np.float32)
    assert to_bf16(values).shape == from_bf16(to_bf16(values)).shape == shape
    strided = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    np.testing.assert_array_equal(from_bf16(to_bf16(strided)), strided)


def test_doubles_are_rounded_too() -> None:
    np.testing.assert_array_equal(from_bf16(to_bf16(np.array([1.0, 1 / 3]))), np.array([1.0, 0.333984375], np.float32))
