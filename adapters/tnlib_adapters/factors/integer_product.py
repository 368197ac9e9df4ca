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

_LARGE = 2**21  # numbers of a matrix that threads share: waking one takes as long as the product with 2^20 of them


class IntegerMatrix:
    """A matrix (m, n) in integers whose groups lie along its rows, as kernels read it.

    `stored` are codes in C order, (m, bytes) uint8 if they are packed and (m, n) int8 otherwise; `scales` are
    (groups, m) float32. Arrays in C order are not copied: changes of the scales in place are seen.

    >>> from tnlib_adapters.factors.integers import pack
    >>> stored = pack(np.array([[0, 3, 1]], np.uint8), 2, axis=1)
    >>> scales = np.ones((1, 1), np.float32)
    >>> matrix = IntegerMatrix(stored, scales, IntegerFormat(2, axis=1), 3)
    >>> matrix.values().tolist()
    [[-1.5, 1.5, -0.5]]
    >>> matrix.times_rows(np.ones((1, 3), np.float32)).tolist()
    [[-0.5]]
    >>> matrix.times_columns(np.ones((1, 1), np.float32)).tolist()
    [[-1.5, 1.5, -0.5]]
    """

    def __init__(self, stored: Array, scales: Array, form: IntegerFormat, n: int) -> None:
        self.shape = len(stored), n
        scales = np.ascontiguousarray(scales)  # so that one compiled version serves all
        group = form.group if len(scales) > 1 else max(n, 1)
        self._matrix: Matrix
        if form.is_packed:
            # a tuple of as many zeros as bits: its length is part of the type, and so compiled in
            width, centre = (0,) * form.bits, np.float32(form.centre)
            self._matrix = stored, _words(stored, form.bits), width, centre, scales, group
        else:
            codes = stored.view(np.uint8)
            self._matrix = codes, codes, (), np.float32(128), scales, group

    def values(self) -> Array:
        """Return the entries, float32."""
        values = np.empty(self.shape, np.float32)
        run_parallel(_values, [(self._matrix, i, j, values) for i, j in self._ranges()])
        return values

    def times_rows(self, x: Array) -> Array:
        """Return x A^T, (vectors, m) float32, for x (vectors, n) float32."""
        y = np.empty((self.shape[0], len(x)), np.float32)
        run_parallel(_dot_products, [(self._matrix, i, j, x, y) for i, j in self._ranges()])
        return y.T

    def times_columns(self, x: Array) -> Array:
        """Return x A, (vectors, n) float32, for x (vectors, m) float32."""
        columns, ranges = np.ascontiguousarray(x.T), self._ranges()
        sums = np.zeros((len(ranges), len(x), self.shape[1]), np.float32)
        run_parallel(_add_rows, [(self._matrix, i, j, columns, y) for (i, j), y in zip(ranges, sums, strict=True)])
        total: Array = sums.sum(axis=0)
        return total

    def _ranges(self) -> list[tuple[int, int]]:
        """Return ranges of rows for one thread each."""
        m, n = self.shape
        return split_range(m, thread_count()) if m * n >= _LARGE else [(0, m)]


def _words(stored: Array, bits: int) -> Array:
    """Return 8 codes of every row as a word, without a copy.

    Words of 3, 5 and 6 bytes are read as 8, with the first bytes of those that follow. At the end of a row, where fewer
    follow, words are left out.
    """
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
    bit = np.uint64(1)
    half = (bit << (4 * bits)) - bit
    quarter = ((bit << (2 * bits)) - bit) * np.uint64(0x0000000100000001)
    eighth = ((bit << bits) - bit) * np.uint64(0x0001000100010001)
    for k in range(len(words)):
        word = words[k]
        word = (word & half) | ((word >> (4 * bits)) & half) << np.uint64(32)
        word = (word & quarter) | ((word >> (2 * bits)) & quarter) << np.uint64(16)
        words[k] = (word & eighth) | ((word >> bits) & eighth) << np.uint64(8)
    return words.view(np.uint8)


@kernel
def _values(matrix: Matrix, i_start: int, i_stop: int, values: Array) -> None:
    """Set values[i, j] to the entries."""
    stored, loaded, width, centre, scales, group = matrix
    n = np.uint64(values.shape[1])  # unsigned indices are not tested for a sign, in loops that run in vector registers
    words = np.empty((n + np.uint64(7)) // np.uint64(8), np.uint64)
    for i in range(i_start, i_stop):
        codes, out, start = _codes(stored[i], loaded[i], width, words), values[i], np.uint64(0)
        for g in range(len(scales)):
            stop = min(start + np.uint64(group), n)
            for j in range(start, stop):
                out[j] = (np.float32(codes[j]) - centre) * scales[g, i]
            start = stop


@kernel
def _dot_products(matrix: Matrix, i_start: int, i_stop: int, x: Array, y: Array) -> None:
    """Set y[i, v] to the sum over j of entry (i, j) times x[v, j]."""
    stored, loaded, width, centre, scales, group = matrix
    n = np.uint64(x.shape[1])
    words = np.empty((n + np.uint64(7)) // np.uint64(8), np.uint64)
    for i in range(i_start, i_stop):
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
def _add_rows(matrix: Matrix, i_start: int, i_stop: int, x: Array, y: Array) -> None:
    """Add the sum over i of x[i, v] times entry (i, j) to y[v, j]."""
    stored, loaded, width, centre, scales, group = matrix
    n = np.uint64(y.shape[1])
    words = np.empty((n + np.uint64(7)) // np.uint64(8), np.uint64)
    for i in range(i_start, i_stop):
        codes = _codes(stored[i], loaded[i], width, words)
        for v in range(x.shape[1]):
            sums, start = y[v], np.uint64(0)
            for g in range(len(scales)):
                factor, stop = x[i, v] * scales[g, i], min(start + np.uint64(group), n)
                for j in range(start, stop):
                    sums[j] += factor * (np.float32(codes[j]) - centre)
                start = stop
