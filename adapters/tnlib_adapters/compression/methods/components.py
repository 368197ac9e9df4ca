r"""Second moments of inputs and output gradients, and the components of a weight in the order that they give.

With A = E[x x^T] of the inputs of a matrix W and P = E[p p^T] = R^T R of the gradients p at its output, the expected
square of x (W' - W) p, as if x and p were independent, is |A^1/2 (W' - W) R^T|^2. Its minimum over W' of rank r is at

    W' = W R^T V_r V_r^T R^-T,        V diag(s^2) V^T = R W^T A W R^T,

so component c is column c of W R^T V times row c of V^T R^-T, and its loss is s_c^2. The sum of all components is W for
any A and P. Without gradients R is the identity: the truncation of Wang et al., SVD-LLM (ICLR 2025).

The gradients at the output of an unembedding W are as wide as the vocabulary, but P occurs only in W P W^T, the second
moments G of the gradients at its input. With the table E = W^T (vocab, width) and E' = E M the error is
|G^1/2 (M - 1) A^1/2|^2, and that of look-ups in a table is |N^1/2 (M - 1) P^1/2|^2, where N = E^T diag(n) E are the
second moments of the rows, looked up n times. A table with both uses has the sum of both errors,

    (m - 1)^T (N (x) P + G (x) A) (m - 1),        m the entries of M,

whose minimum over M of rank r has no closed form. The nearest Kronecker product (Van Loan and Pitsianis, 1993) of the
bracket takes its place, which has: its factors are positive sums of N and G, and of P and A. The loss of a component is
that of the bracket itself. G makes the rows count that no text looks up: the model gives every token a probability, and
the errors of all logits meet in the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.files.process_memory import LARGE_TABLE

if TYPE_CHECKING:
    import torch

_COLUMNS, _ROWS = 64, 4096  # in memory at once as squares, and in double precision
_LARGE_WEIGHT = 2**22  # numbers; below, a decomposition in double precision takes less than a second
_RAISED = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4)  # shifts of singular moments, of a mean eigenvalue of 1


def second_moments(x: Array) -> Array:
    """Return the sum of x x^T over all axes but the last."""
    # numpy recognises a.T @ a and computes half of the symmetric product
    flat = x.reshape(-1, x.shape[-1])
    moments: Array = flat.T @ flat  # [tokens]
    return moments


def upper_triangle(moments: Array) -> Array:
    """Return the rows of a symmetric matrix from the diagonal on, as one vector.

    >>> upper_triangle(np.array([[1.0, 2.0], [2.0, 3.0]]))
    array([1., 2., 3.])
    """
    triangle: Array = moments[np.tri(len(moments), dtype=bool).T]
    return triangle


def from_upper_triangle(triangle: Array) -> Array:
    """Return the symmetric matrix of `upper_triangle`."""
    n = (math.isqrt(8 * len(triangle) + 1) - 1) // 2
    moments, upper = np.empty((n, n), triangle.dtype), np.tri(n, dtype=bool).T
    moments[upper] = moments.T[upper] = triangle
    return moments


def damped(moments: Array, share: float) -> Array:
    """Return second moments plus `share` of their mean on the diagonal, which raises small eigenvalues."""
    if moments.ndim == 1:
        diagonal: Array = moments + share * moments.mean()
        return diagonal
    raised: Array = moments + share * np.trace(moments) / len(moments) * np.eye(len(moments), dtype=moments.dtype)
    return raised


def triangular_factor(moments: Array) -> Array:
    """Return R, upper triangular, with R^T R = C up to a factor: ten times faster than by eigenvalues for large C.

    A singular C is shifted by a multiple of the identity of the size of its rounding errors.
    """
    size = float(np.trace(moments)) / len(moments)
    if size <= 0:
        return np.eye(len(moments))
    for raised in _RAISED:
        try:
            lower: Array = np.linalg.cholesky(moments / size + raised * np.eye(len(moments)))
        except np.linalg.LinAlgError:
            continue
        return lower.T
    raise ArithmeticError(f"triangular_factor: moments of size {len(moments)} have eigenvalues far below zero")


@dataclass(frozen=True)
class Components:
    """Left (m, r) and right (r, n), whose product is a matrix, and the loss without each of the r components.

    Without moments the sum of all losses is 1.
    """

    left: Array
    right: Array
    losses: Array

    def scaled(self, scale: float) -> Components:
        """Return the components with losses multiplied by a scale."""
        return replace(self, losses=float(scale) * self.losses)

    def with_losses(self, losses: Array) -> Components:
        """Return the components in the order of other losses, the largest first."""
        order = np.argsort(-losses, kind="stable")
        return Components(self.left[:, order], self.right[order], losses[order])

    @property
    def lost(self) -> Array:
        """Losses with the first 0, 1, ... components kept, (r + 1,)."""
        return np.append(np.cumsum(self.losses[::-1])[::-1], 0.0)

    def curve(self, n_dense: int, *, gauged: bool, looked_up: bool = False) -> Curve:
        """Return numbers and losses of 0, 1, ... components while smaller than `n_dense`, then the dense weight.

        If `gauged`, the r^2 numbers that the gauge of a product frees are not stored, but r row indices are. Second
        costs are multiplications per token: of two linear layers or the dense one, whichever takes fewer, where a bias
        row is one more input; of one row times `right` if rows are only `looked_up`.
        """
        r, n_two = np.arange(len(self.losses) + 1), len(self.left) + self.right.shape[1]
        costs = r * n_two + (r - r**2 if gauged else 0)
        smaller = costs < n_dense
        flops = r * self.right.shape[1] if looked_up else np.minimum(r * n_two, n_dense)
        second_costs = np.append(flops[smaller], 0 if looked_up else n_dense)
        return Curve(np.append(costs[smaller], n_dense), np.append(self.lost[smaller], 0.0), second_costs)

    def first(self, rank: int) -> tuple[Array, Array]:
        """Return the factors of the first `rank` components."""
        return self.left[:, :rank], self.right[:rank]


def rounding_loss(error: Array, reads: Array | None = None, slopes: Array | None = None) -> float:
    """Return tr(P E^T A E), the expected square of x E p, for an error E (m, n).

    `reads` (m, m) are second moments A of the inputs x, (m,) if they are diagonal; `slopes` (n, n) those, P, of the
    gradient p at the output. None is the identity.

    >>> rounding_loss(np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([1.0, 0.5]))
    3.0
    """
    if reads is not None and reads.ndim > 1:
        if slopes is None:
            return rounding_loss(error.T, slopes=reads)
        return float(np.vdot(reads @ error, error @ slopes))
    total = 0.0
    for rows in (slice(k, k + _ROWS) for k in range(0, len(error), _ROWS)):  # no product as large as a table
        left = error[rows] if reads is None else multiply_rows(reads[rows], error[rows])
        total += float(np.vdot(left, error[rows] if slopes is None else error[rows] @ slopes))
    return total


def components_on_device(weight: Array, reads: Array, slopes: Array, device: str) -> Components:
    """Return the components with their losses in units of `rounding_loss`.

    Those of a large weight are computed in single precision on a device of torch.
    """
    total = rounding_loss(weight, reads, slopes)
    if weight.size >= _LARGE_WEIGHT and weight.dtype != np.float64 and reads.ndim > 1:
        import torch

        return components_in_single_precision(weight, reads, slopes, torch.device(device)).scaled(total)
    return components(weight, reads, slopes).scaled(total)


def components(weight: Array, reads: Array | None = None, slopes: Array | None = None) -> Components:
    """Return the components of a matrix (m, n), acting on rows, by descending loss, in its dtype.

    Moments `reads` of the inputs and `slopes` of the gradients are those of `rounding_loss`.
    """
    if len(weight) < weight.shape[1]:
        other = components(weight.T, slopes, reads)
        return Components(other.right.T, other.left.T, other.losses)
    if is_large_table(weight.shape) and slopes is not None and (reads is None or reads.ndim == 1):
        table = table_components(weight, [(moments_of_rows(weight, reads), slopes)])
        return table.scaled(1 / (table.losses.sum() or 1.0))
    dtype, onto = weight.dtype, weight.astype(np.float64)
    root, inverse = (None, None) if slopes is None else moment_roots(slopes.astype(np.float64))
    if root is not None:
        for k in range(0, len(onto), _ROWS):  # m n, in place: of a table of embeddings it is large
            onto[k : k + _ROWS] = multiply_rows(root, onto[k : k + _ROWS].T).T
    # the dtype of the weight: single precision takes half the time, and components below its rounding hardly matter
    scaled = _divided(onto, float(np.linalg.norm(onto)) or 1.0, dtype)
    if reads is None:
        gram = scaled.T @ scaled
    else:
        gram = scaled.T @ multiply_rows(_divided(reads, float(reads.max()) or 1.0, dtype), scaled)
    del scaled
    if root is None:
        onto = weight  # converted again in blocks: for a table of embeddings, twice the table less in memory
    return _along_eigenvectors(onto, gram, inverse, dtype)


def components_in_single_precision(weight: Array, reads: Array, slopes: Array, device: torch.device) -> Components:
    """Return `components` computed in single precision on a device of torch.

    The root of the moments of the gradients and the triangular solution are in double precision, on the host where the
    device has none.
    """
    import torch

    def placed(a: Array) -> torch.Tensor:
        return torch.from_numpy(a.astype(np.float32, copy=False)).to(device)

    if len(weight) < weight.shape[1]:
        other = components_in_single_precision(weight.T, slopes, reads, device)
        return Components(other.right.T, other.left.T, other.losses)
    exact = torch.device("cpu") if device.type == "mps" else device  # that has no double precision
    root = torch.from_numpy(triangular_factor(slopes.astype(np.float64))).to(exact)  # n n
    onto = placed(weight) @ root.mT.to(device, torch.float32)  # m n
    scaled, moments = onto / onto.norm().clamp(min=1e-30), placed(reads)
    gram = scaled.mT @ (moments @ scaled).div_(moments.amax().clamp(min=1e-30))
    del scaled, moments
    try:
        values, v = torch.linalg.eigh(gram)
    except RuntimeError:  # it did not converge, or is not implemented there
        values, v = (a.to(gram) for a in torch.linalg.eigh(gram.cpu().double()))
    losses, v = values.double().clamp(min=0).flip(0), v.flip(1)
    left = onto @ v
    right = torch.linalg.solve_triangular(root, v.to(exact, torch.float64), upper=True).mT
    of_left, of_right = left.double().norm(dim=0).to(exact), right.norm(dim=1)
    balance = torch.where(of_left > 0, (of_right / of_left).sqrt(), 1.0)
    left *= balance.to(device, torch.float32)
    right /= balance[:, None]
    losses /= losses.sum() or 1.0
    left_array, right_array = (a.cpu().numpy().astype(weight.dtype, copy=False) for a in (left, right))
    return Components(left_array, right_array, losses.cpu().numpy())


def moments_of_rows(weight: Array, counts: Array | None = None) -> Array:
    """Return the second moments (width, width), in double precision, of rows looked up so many times; None for once."""
    counts = np.ones(len(weight)) if counts is None else counts
    used = np.flatnonzero(counts)
    moments = np.zeros((weight.shape[1], weight.shape[1]))
    for k in range(0, len(used), _ROWS):
        rows = weight[used[k : k + _ROWS]].astype(np.float64)
        moments += rows.T @ multiply_rows(counts[used[k : k + _ROWS]], rows)
    return moments


def is_large_table(shape: Sequence[int]) -> bool:
    """Test if no array in double precision is made of a table of this shape."""
    return math.prod(shape) >= LARGE_TABLE


def table_components(weight: Array, uses: Sequence[tuple[Array, Array]]) -> Components:
    """Return the components of a table of embeddings (vocab, width) by descending loss, that of all its uses together.

    Uses are pairs of second moments (width, width): for look-ups those of the rows that are looked up, and of the
    gradients at these; for predictions those of the gradients at the input, and of the input.
    """
    rows, columns = nearest_kronecker_product([(a.astype(np.float64), b.astype(np.float64)) for a, b in uses])
    root, inverse = moment_roots(columns)
    gram = root @ rows @ root.T
    components = _along_eigenvectors(weight, gram / (gram.max() or 1.0), inverse, weight.dtype, through=root.T)
    second = components.right.T.astype(np.float64)
    v = root @ second
    first = root.T @ v / np.maximum((v**2).sum(0), np.finfo(np.float64).tiny)  # left = weight @ first
    losses = np.zeros(len(v))
    for of_inputs, of_gradients in uses:
        losses += _of_columns(first, of_inputs) * _of_columns(second, of_gradients)
    return components.with_losses(losses)


def _of_columns(x: Array, moments: Array) -> Array:
    """Return x_c^T C x_c of every column c."""
    products: Array = np.einsum("ic,ic->c", x, moments @ x)
    return products


def nearest_kronecker_product(terms: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return the factors of the Kronecker product nearest to a sum of Kronecker products, up to their scales.

    Terms are pairs of arrays; moments that are diagonal may be given by their diagonals.

    >>> a, b = nearest_kronecker_product(
    ...     [(np.eye(2), np.array([1.0, 0.0])), (np.eye(2), np.array([0.0, 3.0]))]
    ... )
    >>> (b / b[0]).round(12).tolist()
    [1.0, 3.0]
    """
    first, second = (np.array([[np.vdot(a, b) for b in side] for a in side]) for side in zip(*terms, strict=True))
    # sum_k A_k (x) B_k, rearranged, is the matrix sum_k vec(A_k) vec(B_k)^T; its leading right singular vector is
    # sum_k c_k vec(B_k) with the leading eigenvector c of the product of both Gram matrices
    values, vectors = np.linalg.eig(first @ second)
    c = np.abs(vectors[:, np.argmax(values.real)].real)  # of one sign, because inner products of moments are positive
    sides = zip(second @ c, c, terms, strict=True)
    weighed = [(u * a, w * b) for u, w, (a, b) in sides]
    return sum(a for a, _ in weighed), sum(b for _, b in weighed)


def _along_eigenvectors(
    onto: Array, gram: Array, inverse: Array | None, dtype: Any, through: Array | None = None
) -> Components:
    """Return the components of a weight, given its product with R^T, the matrix to diagonalise and R^-1.

    With `through`, which is R^T, `onto` is the weight itself: of a table of embeddings one product less in memory.
    """
    values, v = (a.astype(np.float64) for a in np.linalg.eigh(gram))
    losses, v = np.maximum(values[::-1], 0.0), v[:, ::-1]
    factors = (v,) if through is None else (through, v)
    left, right = _multiplied(onto, *factors), v.T if inverse is None else multiply_rows(inverse, v).T
    # of some columns at a time: no array of all squares
    blocks = (left[:, k : k + _COLUMNS] for k in range(0, left.shape[1], _COLUMNS))
    of_left = np.concatenate([np.linalg.norm(block, axis=0) for block in blocks])
    of_right = np.linalg.norm(right, axis=1)
    balance = np.sqrt(np.divide(of_right, of_left, out=np.ones_like(losses), where=of_left > 0))
    total = losses.sum()
    left *= balance  # in place: of a table of embeddings it is the largest array of a compression
    right = (right / balance[:, None]).astype(dtype)
    return Components(left.astype(dtype, copy=False), right, losses / total if total > 0 else losses)


def _multiplied(a: Array, *factors: Array) -> Array:
    """Return the product of `a` and these, with as many rows of `a` in float64 as fit into a block.

    It is in float64, that of a large table in its dtype.
    """
    *first, last = factors
    product = np.empty((len(a), last.shape[1]), a.dtype if is_large_table(a.shape) else np.float64)
    for k in range(0, len(a), _ROWS):
        rows = reduce(np.matmul, first, a[k : k + _ROWS].astype(np.float64, copy=False))
        np.matmul(rows, last, out=product[k : k + _ROWS], casting="same_kind")
    return product


def _divided(a: Array, number: float, dtype: Any) -> Array:
    """Return `a / number` in another dtype, without the quotient in that of `a`."""
    quotient = np.empty_like(a, dtype)
    np.divide(a, number, out=quotient, casting="same_kind")
    return quotient


def moment_roots(moments: Array) -> tuple[Array, Array]:
    """Return R with R^T R = C up to a factor, see `triangular_factor`, and its inverse; diagonals (m,) for (m,)."""
    if moments.ndim == 1:
        root = np.sqrt(np.maximum(moments, 1e-12 * moments.max(initial=1e-300)))
        return root, 1 / root
    root = triangular_factor(moments)
    return root, np.linalg.inv(root.T).T


def multiply_rows(matrix: Array, x: Array) -> Array:
    """Return the product with a matrix, or with a diagonal matrix (m,)."""
    product: Array = matrix[:, None] * x if matrix.ndim == 1 else matrix @ x
    return product
