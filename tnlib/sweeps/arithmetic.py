"""Sums and products of trains, core by core: ranks add in a sum and multiply in a product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scale import largest, shift
from tnlib.sweeps.scale import even_out

_FAR = 1 << 14  # powers of two; what is so much smaller than another term is gone


def in_one_scale(
    trains: Sequence[tuple[Sequence[Array], float]],
) -> tuple[list[list[Array]], float]:
    """Return the cores of trains (cores, log_scale) that are to be added, and the log_scale that they now share.

    What has to be multiplied with a power of two to get there has all its cores multiplied alike: a thousand cores of
    size 1e3 and a log_scale that takes it back must not meet in one of them.
    """
    if len({log_scale for _, log_scale in trains}) == 1 and all(_is_plain(cores) for cores, _ in trains):
        return [list(cores) for cores, _ in trains], trains[0][1]
    parts = [even_out(cores, log_scale) for cores, log_scale in trains]
    # a train with a core of zeros is zero, whatever its scale says
    top = max((twos for cores, twos, _ in parts if all(largest(c) > 0 for c in cores)), default=0)
    out = []
    for cores, twos, factor in parts:
        behind = max(-_FAR * len(cores), min(0, twos - top))
        steps = [behind // len(cores) + (k < behind % len(cores)) for k in range(len(cores))]
        moved = [shift(core, e) for core, e in zip(cores, steps, strict=True)]
        out.append([moved[0] * moved[0].real.dtype.type(factor), *moved[1:]])
    return out, top * math.log(2)


def add_cores(terms: Sequence[Sequence[Array]], *, stacked: int | None = None) -> list[Array]:
    """Return the cores (l, n, r) of the sum of trains, blocks along the diagonal.

    Leg `stacked` of one term is laid behind that of the one before instead of being added to it.
    """
    dtype, last = np.result_type(*(core for cores in terms for core in cores)), len(terms[0]) - 1
    out = []
    for k in range(last + 1):
        blocks = [cores[k] for cores in terms]
        steps = [int(k > 0), int(k == stacked), int(k < last)]  # which legs of the blocks lie one behind the other
        sizes = [sum(b.shape[i] for b in blocks) if steps[i] else blocks[0].shape[i] for i in range(3)]
        core, at = np.zeros(sizes, dtype), [0, 0, 0]
        for block in blocks:
            core[tuple(slice(start, start + n) for start, n in zip(at, block.shape, strict=True))] += block
            at = [start + n * step for start, n, step in zip(at, block.shape, steps, strict=True)]
        out.append(core)
    return out


def multiply_entries(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    """Return the cores of the train whose every entry is the product of those of two trains of cores (l, n, r)."""
    out = []
    for one, other in zip(a, b, strict=True):
        (l, n, r), (m, _, s) = one.shape, other.shape
        # la 1 n ra 1 times 1 lb n 1 rb
        out.append((one[:, None, :, :, None] * other[None, :, :, None, :]).reshape(l * m, n, r * s))
    return out


def multiply_cores(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    """Return the cores (la lb, m, p, ra rb) of the matrix product of cores (la, m, n, ra) and (lb, n, p, rb)."""
    out = []
    for one, other in zip(a, b, strict=True):
        (l, m, _, r), (k, _, p, s) = one.shape, other.shape
        product = np.tensordot(one, other, axes=([2], [1]))  # la m [n] ra lb [n] p rb
        out.append(product.transpose(0, 3, 1, 4, 2, 5).reshape(l * k, m, p, r * s))
    return out


def times_number(core: Array, number: complex | np.number) -> tuple[Array, int]:
    """Return number * core, and e: where that would leave the range of the dtype, it is 2**e times smaller."""
    dtype = np.result_type(core, number)
    # An exponent of the number and one of the core: their sum says whether the product stays in range.
    e = math.frexp(max(abs(float(number.real)), abs(float(number.imag))))[1]
    if abs(e + math.frexp(largest(core))[1]) <= 100 and abs(e) <= 100:  # of 127 in single precision
        return np.asarray(core * dtype.type(number), dtype), 0
    mantissa = np.asarray(shift(np.asarray(number, np.result_type(np.float64, number)), -e), dtype)
    return np.asarray(core * mantissa, dtype), e


def _is_plain(cores: Sequence[Array]) -> bool:
    """Say whether `even_out` would leave cores as they are."""
    return all(core is same for core, same in zip(cores, even_out(cores, 0.0)[0], strict=True))
