"""Seconds to factorise the weights of a model, measured on random ones.

Decompositions and roundings of an (m, n) weight take a number of operations that is cubic in the sizes. Weights above a
limit are timed at smaller sizes of the same ratio; their seconds are extrapolated by the cube.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.grouped_heads import Sizes
from tnlib_adapters.compression.calibration.whitening import factorise_weight_on
from tnlib_adapters.compression.cost.shapes import Shape, Shapes
from tnlib_adapters.compression.methods.components import components, components_in_single_precision, is_large
from tnlib_adapters.compression.methods.factorise import factorise_layer, factorise_weight
from tnlib_adapters.compression.methods.quantized import QuantizedWeight
from tnlib_adapters.compression.methods.table import TABLE
from tnlib_adapters.compression.request import Progress, Request
from tnlib_adapters.factors.projections import Projections

_LARGEST, _LARGEST_ROUNDED = 3e10, 3e8  # m n (m + n) of a weight that is timed; rounding takes longer


def time_decompositions(shapes: Shapes, request: Request, progress: Progress) -> dict[Shape, float]:
    """Return the seconds to factorise one weight of every shape that is compressed."""
    row = TABLE[request.method]
    limit = _LARGEST_ROUNDED if request.in_bits else _LARGEST

    def factorise(shape: Shape, whole: Shape) -> Callable[[], None]:
        weight, is_table = _random(*shape), whole in shapes.tables
        by_matrix = TABLE["matrix"] if is_table or row.unit == "layer" else row
        if request.calibrate is None:
            return lambda: _drop(factorise_weight(by_matrix, weight))
        reads, slopes = (np.ones(shape[0], np.float32) if is_table else _moments(shape[0])), _moments(shape[1])
        if not request.fits_model:
            return lambda: _drop(factorise_weight_on(by_matrix, weight, reads))

        def by_moments() -> None:
            _decompose(weight, reads, slopes, whole)
            if request.in_bits:
                _round(weight, reads, slopes, request, by_row=is_table)

        return by_moments

    return _times(shapes, factorise, limit, progress)


def _drop(_: Any) -> None:
    """Do nothing with a result."""


def time_layer(sizes: Sizes, shapes: Shapes, request: Request, rotary: bool) -> float:
    """Return the seconds to factorise the attention of a layer by a method of unit "layer"; 0 for other methods."""
    row = TABLE[request.method]
    if row.unit != "layer" or not shapes.layers:
        return 0.0
    ratio = _reduction((sizes.d_model, sizes.n_heads * sizes.d_head), _LARGEST)
    per_group = sizes.group_size
    kv_heads = max(1, round(sizes.kv_heads / ratio))
    small = Sizes(1, kv_heads * per_group, max(2, round(sizes.d_model / ratio)), kv_heads, sizes.d_head, sizes.d_value)
    weights = {
        name: _random(width, small.d_model) if name == "o" else _random(small.d_model, width)
        for name, width in small.widths.items()
    }
    started = time.perf_counter()
    factorise_layer(row, Projections(weights, {}), small, rotary=rotary)
    grown = sizes.n_heads / small.n_heads * (sizes.d_model / small.d_model) ** 2
    return (time.perf_counter() - started) * grown


def _decompose(weight: Array, reads: Array, slopes: Array, whole: Shape) -> None:
    """Decompose a weight as one of a shape is."""
    import torch

    if is_large(whole) and reads.ndim > 1:
        components_in_single_precision(weight, reads, slopes, torch.device("cpu"))
    else:
        components(weight, reads, slopes)


def _round(weight: Array, reads: Array, slopes: Array, request: Request, *, by_row: bool) -> None:
    """Measure the losses of all forms of a weight, and round it to one of them."""
    fewer = request.keep is not None
    weight_forms = QuantizedWeight(weight, reads, slopes, 1.0, by_row=by_row, bits=request.width, fewer_numbers=fewer)
    at = next(k for k, option in enumerate(weight_forms.options) if option.is_whole)
    weight_forms.rounded(at)


def _times(
    shapes: Shapes, work: Callable[[Shape, Shape], Callable[[], None]], limit: float, progress: Progress
) -> dict[Shape, float]:
    """Return the seconds for every shape that is compressed.

    work(reduced, shape) makes random weights of a reduced shape, and returns the function that is timed.
    """
    every = sorted(set(shapes.all_weights()))
    seconds, of_small = dict[Shape, float](), dict[tuple[Shape, bool], float]()
    work((16, 16), (16, 16))()  # libraries prepare themselves at the first call
    for done, shape in enumerate(every):
        progress("timing decompositions", done, len(every))
        small, is_table = _reduced(shape, limit), shape in shapes.tables
        if (small, is_table) not in of_small:
            run = work(small, shape)
            started = time.perf_counter()
            run()
            of_small[small, is_table] = time.perf_counter() - started
        seconds[shape] = of_small[small, is_table] * _operations(shape) / _operations(small)
    progress("timing decompositions", len(every), len(every))
    return seconds


def _operations(shape: Shape) -> float:
    m, n = shape
    return float(m) * n * (m + n)


def _reduction(shape: Shape, limit: float) -> float:
    return float(max(1.0, (_operations(shape) / limit) ** (1 / 3)))


def _reduced(shape: Shape, limit: float) -> Shape:
    ratio = _reduction(shape, limit)
    return max(1, round(shape[0] / ratio)), max(1, round(shape[1] / ratio))


def _random(m: int, n: int) -> Array:
    return np.random.default_rng(0).standard_normal((m, n), np.float32)


def _moments(n: int) -> Array:
    x = _random(2 * n, n)
    moments: Array = x.T @ x
    return moments
