"""Operations on an array of a device beside those of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import other_arrays
import pytest

from tnlib.linalg.device_array import DeviceArray, contiguous, on_host

CASES = [(1, 6, 50), (40, 6, 1), (7, 5, 3)]  # slabs, rows, columns


def on_device(a: np.ndarray) -> DeviceArray:
    return DeviceArray(other_arrays.to_device(a))


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", CASES)
def test_products_in_double_precision(shape: tuple[int, int, int], dtype: Any) -> None:
    a, wide = oracles.normal(shape, dtype), np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    device, exact = on_device(a), a.astype(wide)
    oracles.assert_close(device.gram(), np.einsum("pmn,pkn->mk", exact, exact.conj()))
    basis = np.linalg.qr(oracles.normal((shape[1], 2), wide, 1))[0]
    projected = device.adjoint_times(basis)
    oracles.assert_close(projected.to_host(), np.einsum("mr,pmn->prn", basis.conj(), exact))
    assert projected.dtype == wide
    assert device.norm() == pytest.approx(oracles.norm(a), rel=1e-14)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_products_with_few_rows_and_residuals(dtype: Any) -> None:
    a = oracles.normal((9, 30), dtype)
    device, wide = on_device(a), np.result_type(dtype, np.float64)
    rows = oracles.normal((3, 30), wide, 1)
    oracles.assert_close(device.times_adjoint(rows), a.astype(wide) @ rows.conj().T)
    left, right = oracles.normal((9, 2), wide, 2), oracles.normal((2, 30), wide, 3)
    for factor in (right, on_device(right)):
        assert device.residual_norm(left, factor) == pytest.approx(oracles.norm(a - left @ right), rel=1e-12)
    np.testing.assert_array_equal(device[np.array([7, 2])], a[[7, 2]])
    u, s, vh = device.svd()
    oracles.assert_close((u * s) @ vh, a, dtype)


def test_shapes_and_conversions() -> None:
    a = oracles.normal((2, 3, 4))
    device = on_device(a)
    assert (device.shape, device.ndim, device.size, len(device)) == ((2, 3, 4), 3, 24, 2)
    np.testing.assert_array_equal(on_host(device.transpose(2, 0, 1).reshape(4, -1)), a.transpose(2, 0, 1).reshape(4, 6))
    np.testing.assert_array_equal(on_host(device.shift(-3)), a / 8)
    assert device.largest() == np.abs(a).max()
    assert contiguous(device) is device
    assert on_host(a) is a
