"""Values of a matrix in integers, and its products with few vectors, without a dequantized copy.

A product with one vector reads the matrix once and is bound by memory, and integers are a fraction of the bytes of
floats. Rows are unpacked one at a time, in the cache. More vectors are multiplied faster by BLAS, with the values.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.kernels import inlined, kernel
from tnlib.linalg.threads import run_parallel, split_range, thread_count
from tnlib_adapters.factors.integers import IntegerFormat

Width: TypeAlias = tuple[int, ...]
Matrix: TypeAlias = tuple[Array, Array, Width, Any, Array, int]

_LARGE = 2**19  # numbers of a matrix that several threads share


def row_values(stored: Array, scales: Array, form: IntegerFormat, n: int) -> Array:
    """Return the values, float32, of a matrix (m, n) in integers whose groups lie along its rows.

    `stored` are codes in C order, (m, bytes) uint8 if they are packed and (m, n) int8 otherwise; `scales` are
    (groups, m) float32.

    >>> from tnlib_adapters.factors.integers import pack
    >>> stored = pack(np.array([[0, 3, 1]], np.uint8), 2, axis=1)
    >>> row_values(stored, np.ones((1, 1), np.float32), IntegerFormat(2, axis=1), 3).tolist()
    [[-1.5, 1.5, -0.5]]
    """
    values = np.empty((len(stored), n), np.float32)
    parts = _parts(len(stored), n)
    run_parallel(_values, [(*_arguments(stored[i:j], scales[:, i:j], form, n), values[i:j]) for i, j in parts])
    return values


def times_rows(x: Array, stored: Array, scales: Array, form: IntegerFormat) -> Array:
    """Return x A^T, (vectors, m) float32, for x (vectors, n) float32 and the matrix A (m, n) of `row_values`.

    >>> stored = np.array([[1, 2], [3, 4]], np.int8)
    >>> times_rows(np.ones((1, 2), np.float32), stored, np.ones((1, 2), np.float32), IntegerFormat(8, axis=1)).tolist()
    [[3.0, 7.0]]
    """
    n = x.shape[1]
    y = np.empty((len(stored), len(x)), np.float32)
    parts = _parts(len(stored), n)
    run_parallel(_dot_products, [(*_arguments(stored[i:j], scales[:, i:j], form, n), x, y[i:j]) for i, j in parts])
    return y.T


def times_columns(x: Array, stored: Array, scales: Array, form: IntegerFormat, n: int) -> Array:
    """Return x A, (vectors, n) float32, for x (vectors, m) float32 and the matrix A (m, n) of `row_values`.

    >>> stored, ones = np.array([[1, 2], [3, 4]], np.int8), np.ones((1, 2), np.float32)
    >>> times_columns(ones, stored, ones, IntegerFormat(8, axis=1), 2).tolist()
    [[4.0, 6.0]]
    """
    columns, parts = np.ascontiguousarray(x.T), _parts(len(stored), n)
    sums = np.zeros((len(parts), len(x), n), np.float32)
    run_parallel(
        _add_rows,
        [
            (*_arguments(stored[i:j], scales[:, i:j], form, n), columns[i:j], y)
            for (i, j), y in zip(parts, sums, strict=True)
        ],
    )
    total: Array = sums.sum(axis=0)
    return total


def _parts(m: int, n: int) -> list[tuple[int, int]]:
    """Return ranges of rows for one thread each."""
    return split_range(m, thread_count()) if m * n >= _LARGE else [(0, m)]


def _arguments(stored: Array, scales: Array, form: IntegerFormat, n: int) -> Matrix:
    """Return a matrix as the kernels read it: stored codes, their words, width, code of 0, scales, numbers of a group.

    The width is a tuple of as many zeros as bits, none for int8: a length is part of the type, and so compiled in.
    """
    group = form.group if len(scales) > 1 else max(n, 1)
    scales = np.ascontiguousarray(scales)  # so that one compiled version serves all
    if not form.is_packed:
        codes = stored.view(np.uint8)
        return codes, codes, (), np.float32(128), scales, group
    return stored, _words(stored, form.bits), (0,) * form.bits, np.float32(form.centre), scales, group


def _words(stored: Array, bits: int) -> Array:
    """Return the words of 8 codes in each row; those of 3, 5 and 6 bytes with later bytes, where the row has 8 more."""
    dtype = {2: np.uint16, 4: np.uint32}.get(bits, np.uint64)
    m, n_bytes = stored.shape
    count = max(0, (n_bytes - np.dtype(dtype).itemsize) // bits + 1)
    return np.ndarray((m, count), dtype, stored if count else None, strides=(n_bytes, bits))


@inlined
def _codes(stored: Array, loaded: Array, width: Width, words: Array) -> Array:
    """Return the codes of a row, one in a byte.

    Of packed codes, 8 are spread over the halves of a word, then over their halves, and so on; the shifts are the same
    for all words, so that several words are done at once. Those of int8 become unsigned, 128 for 0.
    """
    if len(width) == 0:
        codes = words.view(np.uint8)
        for j in range(len(stored)):
            codes[j] = stored[j] ^ np.uint8(128)
        return codes
    for k in range(len(loaded)):  # a loop of its own: words of 3, 5 and 6 bytes are not loaded several at once
        words[k] = loaded[k]
    for k in range(len(loaded), len(words)):
        word = np.uint64(0)
        for byte in range(len(width)):
            word |= np.uint64(stored[len(width) * k + byte]) << np.uint64(8 * byte)
        words[k] = word
    bits = np.uint64(len(width))
    one = np.uint64(1)
    half = (one << (4 * bits)) - one
    quarter = ((one << (2 * bits)) - one) * np.uint64(0x0000000100000001)
    eighth = ((one << bits) - one) * np.uint64(0x0001000100010001)
    for k in range(len(words)):
        word = words[k]
        word = (word & half) | ((word >> (4 * bits)) & half) << np.uint64(32)
        word = (word & quarter) | ((word >> (2 * bits)) & quarter) << np.uint64(16)
        words[k] = (word & eighth) | ((word >> bits) & eighth) << np.uint64(8)
    return words.view(np.uint8)


@kernel
def _values(
    stored: Array, loaded: Array, width: Width, centre: np.float32, scales: Array, group: int, values: Array
) -> None:
    """Set values[i, j] to the entries."""
    n = np.uint64(values.shape[1])  # unsigned indices are not tested for a sign, in loops that run in vector registers
    words = np.empty((n + np.uint64(7)) // np.uint64(8), np.uint64)
    for i in range(len(stored)):
        codes, out, start = _codes(stored[i], loaded[i], width, words), values[i], np.uint64(0)
        for g in range(len(scales)):
            stop = min(start + np.uint64(group), n)
            for j in range(start, stop):
                out[j] = (np.float32(codes[j]) - centre) * scales[g, i]
            start = stop


@kernel
def _dot_products(
    stored: Array, loaded: Array, width: Width, centre: np.float32, scales: Array, group: int, x: Array, y: Array
) -> None:
    """Set y[i, v] to the sum over j of entry (i, j) times x[v, j]."""
    n = np.uint64(x.shape[1])
    words = np.empty((n + np.uint64(7)) // np.uint64(8), np.uint64)
    for i in range(len(stored)):
        codes = _codes(stored[i], loaded[i], width, words)
        for v in range(len(x)):
            inputs, total, start = x[v], np.float32(0), np.uint64(0)
            for g in range(len(scales)):
                part, stop = np.float32(0), min(start + np.uint64(group), n)
                for j in range(start, stop):
                    part += (np.float32(codes[j]) - centre) * inputs[j]
                total += scales[g, i] * part
                start = stop
            y[i, v] = total


@kernel
def _add_rows(
    stored: Array, loaded: Array, width: Width, centre: np.float32, scales: Array, group: int, x: Array, y: Array
) -> None:
    """Add the sum over i of x[i, v] times entry (i, j) to y[v, j]."""
    n = np.uint64(y.shape[1])
    words = np.empty((n + np.uint64(7)) // np.uint64(8), np.uint64)
    for i in range(len(stored)):
        codes = _codes(stored[i], loaded[i], width, words)
        for v in range(x.shape[1]):
            sums, start = y[v], np.uint64(0)
            for g in range(len(scales)):
                factor, stop = x[i, v] * scales[g, i], min(start + np.uint64(group), n)
                for j in range(start, stop):
                    sums[j] += factor * (np.float32(codes[j]) - centre)
                start = stop
