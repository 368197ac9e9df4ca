r"""Published baselines below 8 bits: rounding to a grid, and low-rank factors at the same number of stored bits.

A weight W (in, out) acts on rows, and C = E[x x^T] are the second moments of its inputs. The functions return the
dequantized weight and the bits that it takes: codes, scales of 16 bits, zero points of as many bits as a code, factors
of 16 or 8 bits per number. Means or sums of moments over tokens give the same result.

Round to nearest, in groups of consecutive inputs of one output, is free of data. GPTQ rounds one input i after the
other and moves the error to the inputs that follow: with C^-1 = U^T U, U upper triangular,

    e = (W_i - Q_i) / U_ii,    W_j -= U_ij e  for j > i,    |C^1/2 (W - Q)|^2 = sum of e^2.

AWQ divides the inputs by s = E|x|^alpha and rounds diag(s) W; alpha has the smallest error |C^1/2 (W - Q)|^2.

SVD-LLM truncates the SVD of R W with R^T R = C, and the two-sided variant that of R W S^T with the second moments
S^T S of the gradients at the output, by one threshold for all weights. MoDeGPT and A3 remove hidden units between two
weights: units of an MLP, and dimensions of a head between queries and keys, or between values and outputs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tnlib_adapters.compression.methods.components import Components, components, moment_roots, multiply_rows

from tnlib._typing import Array

SCALE_BITS = 16
_CLIPS = np.linspace(1.0, 0.2, 24)  # fractions of the range of a group
_ALPHAS = np.arange(20) / 20
_DAMPING = 0.01  # of the mean diagonal entry
_SMALLEST = float(np.finfo(np.float16).tiny)


@dataclass(frozen=True)
class Rounded:
    """A dequantized weight (in, out), and the bits that it takes."""

    weight: Array
    n_bits: int


@dataclass(frozen=True)
class Grid:
    """Uniform grid, scale * (code - zero), shared by `group` consecutive inputs of one output; 0 for all inputs.

    The zero point is an integer that is stored, or if `symmetric` the centre of the codes. With one bit it is always
    the centre, because one of two values would be 0.
    """

    bits: int
    group: int
    symmetric: bool = False

    def __str__(self) -> str:
        width = "1 bit" if self.bits == 1 else f"{self.bits} bits"
        return f"{width}, " + (f"groups of {self.group}" if self.group else "rows")

    @property
    def has_zero(self) -> bool:
        """True if zero points are stored."""
        return not self.symmetric and self.bits > 1

    def starts(self, n_inputs: int) -> range:
        """Return the first input of every group."""
        return range(0, n_inputs, self.group or n_inputs)

    def count(self, shape: tuple[int, ...]) -> int:
        """Return the bits of a weight.

        >>> Grid(4, group=64).count((128, 10)) / 1280  # 4 + (16 + 4) / 64
        4.3125
        """
        n_inputs, n_outputs = shape
        of_group = SCALE_BITS + (self.bits if self.has_zero else 0)
        return n_outputs * (n_inputs * self.bits + len(self.starts(n_inputs)) * of_group)

    def fit(self, rows: Array, importance: Array | None = None, *, search: bool = True) -> tuple[Array, Array]:
        """Return scales and zeros (out,) of one group (inputs, out).

        The range is clipped to the fraction of smallest squared error, weighed by `importance` (inputs,).
        """
        top = 2**self.bits - 1
        low, high = np.minimum(rows.min(0), 0.0), np.maximum(rows.max(0), 0.0)
        if not self.has_zero:
            high = np.maximum(high, -low)
            low = -high
        importance = np.ones(len(rows)) if importance is None else importance
        best, least = (np.zeros(len(low)), np.zeros(len(low))), np.full(len(low), np.inf)
        for clip in _CLIPS if search else _CLIPS[:1]:
            scale = np.maximum(clip * (high - low) / top, _SMALLEST).astype(np.float16).astype(np.float64)
            zero = np.clip(np.rint(-clip * low / scale), 0, top) if self.has_zero else np.full(len(low), top / 2)
            error = importance @ (self.round(rows, scale, zero) - rows) ** 2
            better = error < least
            least = np.where(better, error, least)
            best = np.where(better, scale, best[0]), np.where(better, zero, best[1])
        return best

    def round(self, rows: Array, scale: Array, zero: Array) -> Array:
        """Return rows rounded to the grid."""
        rounded: Array = scale * (np.clip(np.rint(rows / scale + zero), 0, 2**self.bits - 1) - zero)
        return rounded


def round_to_nearest(weight: Array, grid: Grid, importance: Array | None = None, *, search: bool = True) -> Rounded:
    """Round a weight to the nearest values of a grid, every group clipped as `Grid.fit` does.

    >>> round_to_nearest(np.array([[0.0], [1.0], [2.2], [3.0]]), Grid(2, group=0)).weight[:, 0].round(2).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    rounded, n_inputs = np.empty(weight.shape), len(weight)
    for start in grid.starts(n_inputs):
        rows = slice(start, start + (grid.group or n_inputs))
        scale, zero = grid.fit(weight[rows], None if importance is None else importance[rows], search=search)
        rounded[rows] = grid.round(weight[rows], scale, zero)
    return Rounded(rounded, grid.count(weight.shape))


def gptq(weight: Array, moments: Array, grid: Grid, *, activation_order: bool = False) -> Rounded:
    """Round a weight by GPTQ (Frantar et al., ICLR 2023).

    Parameters
    ----------
    weight
        (in, out).
    moments
        (in, in), second moments of the inputs.
    grid
        The scale of a group is computed when its first input is rounded.
    activation_order
        If True, inputs are rounded by descending second moment; the scales are then those of the weight before, so that
        groups stay consecutive and the order is not stored.
    """
    n_inputs = len(weight)
    order = np.argsort(-np.diag(moments), kind="stable") if activation_order else np.arange(n_inputs)
    remaining, hessian = weight[order].astype(np.float64), moments[np.ix_(order, order)].astype(np.float64)
    dead = np.diag(hessian) == 0
    hessian[dead, dead], remaining[dead] = 1.0, 0.0
    hessian += _DAMPING * np.diag(hessian).mean() * np.eye(n_inputs)
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T  # C^-1 = U^T U
    size = grid.group or n_inputs
    static = [grid.fit(weight[start : start + size]) for start in grid.starts(n_inputs)] if activation_order else []
    rounded = np.empty(weight.shape)
    for k, channel in enumerate(order):
        if static:
            scale, zero = static[channel // size]
        elif k % size == 0:
            scale, zero = grid.fit(remaining[k : k + size])
        rounded[channel] = grid.round(remaining[k], scale, zero)
        remaining[k + 1 :] -= np.outer(upper[k, k + 1 :], (remaining[k] - rounded[channel]) / upper[k, k])
    return Rounded(rounded, grid.count(weight.shape))


def awq(weight: Array, moments: Array, magnitudes: Array, grid: Grid, *, folded: bool) -> Rounded:
    """Round a weight with scaled inputs, by AWQ (Lin et al., MLSys 2024).

    Parameters
    ----------
    weight
        (in, out). Weights that read the same input share its scales: give them side by side.
    moments
        (in, in), second moments of the inputs.
    magnitudes
        (in,), mean absolute values of the inputs.
    grid
        Ranges are clipped for the chosen alpha, by the diagonal of the moments.
    folded
        True if the scales are multiplied into the weight or norm before, so that they need not be stored.
    """
    magnitudes = np.maximum(magnitudes, 1e-6 * magnitudes.max())
    best, least = np.ones(len(weight)), math.inf
    for alpha in _ALPHAS:
        scale = magnitudes**alpha
        scale /= math.sqrt(scale.max() * scale.min())
        scale = scale.astype(np.float16).astype(np.float64)
        difference = round_to_nearest(weight * scale[:, None], grid, search=False).weight / scale[:, None] - weight
        error = float(np.vdot(difference, moments @ difference))
        if error < least:
            best, least = scale, error
    rounded = round_to_nearest(weight * best[:, None], grid, np.diag(moments) / best**2)
    return Rounded(rounded.weight / best[:, None], rounded.n_bits + (0 if folded else SCALE_BITS * len(weight)))


def svd_llm(weight: Array, moments: Array) -> Components:
    """Return the components of a weight by SVD-LLM (Wang et al., ICLR 2025); losses are squared singular values."""
    return two_sided(weight, moments, None)


def two_sided(weight: Array, moments: Array, slopes: Array | None) -> Components:
    """Return the components of a weight whitened on both sides, by input moments and moments of output gradients."""
    onto = weight if slopes is None else multiply_rows(slopes, weight.T).T
    normalized = components(weight.astype(np.float64), moments, slopes)
    return Components(
        normalized.left, normalized.right, normalized.losses * np.vdot(multiply_rows(moments, weight), onto)
    )


def count_component(shape: tuple[int, ...], bits: int) -> int:
    """Return the bits of a row and a column of factors; those of 8 bits have a scale each."""
    return sum(shape) * bits + (0 if bits == 16 else 2 * SCALE_BITS)


def low_rank(parts: Components, rank: int, bits: int = 16) -> Rounded:
    """Return the product of the first components as stored: in float16, or in int8 with a scale for each vector."""
    left, right = parts.first(rank)
    shape = (len(left), right.shape[1])
    return Rounded(stored(left, bits) @ stored(right.T, bits).T, rank * count_component(shape, bits))


def global_ranks(parts: Sequence[Components], budget: int, bits: int = 16) -> list[int]:
    """Return ranks of one budget for several weights: the components of largest loss per bit.

    >>> one, other = (Components(np.eye(2), np.eye(2), np.array(losses)) for losses in ([9.0, 2.0], [3.0, 1.0]))
    >>> global_ranks([one, other], budget=2 * count_component((2, 2), 16))
    [1, 1]
    """
    costs = [count_component((len(part.left), part.right.shape[1]), bits) for part in parts]
    ranks, queue = (
        [0] * len(parts),
        [(-part.losses[0] / cost, k) for k, (part, cost) in enumerate(zip(parts, costs, strict=True))],
    )
    heapq.heapify(queue)
    while queue:
        _, k = heapq.heappop(queue)
        if costs[k] > budget:
            continue
        ranks[k], budget = ranks[k] + 1, budget - costs[k]
        if ranks[k] < len(parts[k].losses):
            heapq.heappush(queue, (-parts[k].losses[ranks[k]] / costs[k], k))
    return ranks


def nystroem(outputs: Array, moments: Array, rank: int) -> tuple[Array, Array]:
    """Return the units of an MLP that MoDeGPT keeps (Lin et al., ICLR 2025), and their output weights.

    With the second moments C of the units, those with the largest ridge leverage scores, the diagonal of
    C (C + a 1)^-1, are kept, and W_S = C_SS^-1 C_S: W reconstructs the product from them. The ridge a is the mean
    diagonal entry.

    Parameters
    ----------
    outputs
        W (units, out).
    moments
        C (units, units).
    rank
        Number of units kept.
    """
    ridge = np.diag(moments).mean()
    scores = np.diag(np.linalg.solve(moments + ridge * np.eye(len(moments)), moments))
    kept = np.sort(np.argsort(-scores, kind="stable")[:rank])
    inner = moments[np.ix_(kept, kept)] + 1e-9 * ridge * np.eye(rank)
    return kept, np.linalg.solve(inner, moments[kept] @ outputs)


def largest_units(outputs: Array, moments: Array, rank: int) -> Array:
    """Return the units of an MLP that A3 keeps (Wong et al., 2025): of largest root mean square times output norm."""
    return np.sort(np.argsort(-np.diag(moments) * (outputs**2).sum(1), kind="stable")[:rank])


def largest_products(queries: Array, keys: Array, rank: int, *, rotary: bool) -> Array:
    """Return the dimensions of a head that both methods keep of rotary queries and keys, MoDeGPT of any (CR).

    Their products of the norms of queries and keys are largest; dimensions that a rotation mixes stay together.

    Parameters
    ----------
    queries, keys
        (d_head, d_head), second moments; those of queries are summed over the heads that share the keys.
    rank
        Number of dimensions kept, even if `rotary`.
    rotary
        True if dimension i is rotated with i + d_head / 2.
    """
    squares = np.diag(queries), np.diag(keys)
    if not rotary:
        return np.sort(np.argsort(-squares[0] * squares[1], kind="stable")[:rank])
    half = len(keys) // 2
    of_pairs = [square[:half] + square[half:] for square in squares]
    kept = np.sort(np.argsort(-of_pairs[0] * of_pairs[1], kind="stable")[: rank // 2])
    return np.concatenate([kept, kept + half])


def query_key_basis(queries: Array, keys: Array, rank: int) -> tuple[Array, Array]:
    """Return M and N (d_head, rank), N^T M = 1, so that q M N^T k^T has the smallest error of A3 without rotations."""
    (root, inverse), (other, inverse_of_other) = moment_roots(queries), moment_roots(keys)
    u, sizes, vh = np.linalg.svd(root @ other.T)
    scales = np.sqrt(np.maximum(sizes[:rank], 1e-12 * sizes[0]))
    return inverse @ u[:, :rank] * scales, inverse_of_other @ vh[:rank].T * scales


def value_basis(outputs: Array, moments: Array, rank: int) -> tuple[Array, Array]:
    """Return M (d_head, rank) and N (rank, d_head), N M = 1, so that M N W_O has the smallest error.

    With the second moments of the values (MoDeGPT) that is the truncated SVD of C^1/2 W_V W_O; A3 takes those of the
    values averaged by attention.
    """
    root, inverse = moment_roots(moments)
    u = np.linalg.svd(root @ outputs, full_matrices=False)[0][:, :rank]
    return inverse @ u, u.T @ root


def stored(columns: Array, bits: int) -> Array:
    """Return columns in float16, or in symmetric int8 with a float16 scale each."""
    if bits == 16:
        return columns.astype(np.float16).astype(np.float64)
    scale = np.maximum(np.abs(columns).max(0, initial=0.0) / 127, _SMALLEST).astype(np.float16).astype(np.float64)
    return scale * np.clip(np.rint(columns / scale), -127, 127)
