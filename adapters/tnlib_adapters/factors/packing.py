"""Codes of 2 to 6 bits packed into bytes.

The axis of the groups is moved last and padded with zeros to a multiple of 8 codes; code k occupies the bits
[bits k, bits (k + 1)) of a little-endian bit stream, so that 8 codes take `bits` bytes.
"""

from __future__ import annotations

import math

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array


def pack(codes: Array, bits: int, axis: int) -> Array:
    """Return uint8 codes below 2^bits packed along an axis, which becomes the last one: `bits` bytes for 8 codes.

    The other axes keep their order. Raises `ArgumentError` if a code does not fit.

    >>> pack(np.array([1, 2, 3], np.uint8), 4, axis=0).tolist()  # padded to 8 numbers
    [33, 3, 0, 0]
    """
    if codes.size and codes.max() >= 2**bits:
        raise ArgumentError(f"pack: codes must be below {2**bits} for {bits} bits, got {codes.max()}; clip them.")
    rows = np.moveaxis(codes, axis, -1)
    n, others = rows.shape[-1], rows.shape[:-1]
    padded = np.zeros((*others, -(-n // 8) * 8), np.uint8)
    padded[..., :n] = rows
    n_codes, n_bytes = period(bits)
    blocks = padded.reshape(-1, n_codes)
    packed = np.zeros((len(blocks), n_bytes), np.uint8)
    for k in range(n_codes):
        byte, shift = divmod(bits * k, 8)
        packed[:, byte] |= blocks[:, k] << shift  # bits above the eighth are lost here
        if shift + bits > 8:
            packed[:, byte + 1] |= blocks[:, k] >> (8 - shift)
    return packed.reshape(*others, padded.shape[-1] // 8 * bits)


def unpack(packed: Array, bits: int, axis: int, length: int) -> Array:
    """Return the codes from packed bytes (other axes, bytes), the inverse of `pack`; those of the padding are dropped.

    >>> unpack(np.array([33, 3, 0, 0], np.uint8), 4, axis=0, length=3).tolist()
    [1, 2, 3]
    """
    n_codes, n_bytes = period(bits)
    blocks = packed.reshape(-1, n_bytes)
    codes = np.empty((len(blocks), n_codes), np.uint8)
    for k in range(n_codes):
        byte, shift = divmod(bits * k, 8)
        code = blocks[:, byte] >> shift
        if shift + bits > 8:
            code |= blocks[:, byte + 1] << (8 - shift)
        np.bitwise_and(code, 2**bits - 1, out=codes[:, k])
    rows = codes.reshape(*packed.shape[:-1], packed.shape[-1] // bits * 8)
    return np.moveaxis(rows[..., :length], -1, axis)


def period(bits: int) -> tuple[int, int]:
    """Return the smallest number of codes that fill whole bytes, and these bytes.

    >>> [period(bits) for bits in (2, 3, 4, 6)]
    [(4, 1), (8, 3), (2, 1), (4, 3)]
    """
    common = math.gcd(8, bits)
    return 8 // common, bits // common
