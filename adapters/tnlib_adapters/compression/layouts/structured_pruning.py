r"""Structured pruning of a layer: rotary planes of queries and keys, dimensions of the values, neurons.

**Rotary planes.** A head of d columns rotates plane j by the frequency b^(-2 j / d). Its planes start, start + step,
... have the frequencies of a head of d' columns with another base b' and a common factor:

    b^(-2 (start + step j) / d) = b'^(-2 j / d') / f,      b' = b^(step d' / d),   f = b^(2 start / d).

f is the factor of the linear scaling of positions, which config.json states.

**Values.** Query heads h of one key-value head share the values v = x W_V + b_V; head h reads their mixture y_h, and
the layer writes the sum of y_h W_O^h. With a projection M = L R of rank r in the space of the values, W_V L and R W_O^h
take the place of W_V and W_O^h. The error of one head in the direction of the gradients p at the output is

    E |y_h (1 - M) W_O^h p|^2 = (1 - m)^T (Y_h (x) G_h) (1 - m),

        Y_h = E[y_h^T y_h],   G_h = W_O^h E[p p^T] W_O^hT,   m the entries of M,

as if y_h and p were independent. The sum over the heads of a group is replaced by the nearest Kronecker product
A (x) B, for which the minimum over M of rank r is that of `components`.

**Neurons.** With A = E[z z^T] of the inputs z of W_down and B = W_down E[p p^T] W_down^T of the gradients p at its
output, neuron j contributes to the error, as if z and p were independent, A_jj B_jj when it is removed, and

    B_jj / (A^-1)_jj

when the rows of the other neurons are refitted by least squares (optimal brain surgeon: Hassibi and Stork, 1993). The
neurons are removed in rounds: after each, A is restricted to the others, and their rows are refitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import components, nearest_kronecker_product
from tnlib_adapters.factors.projections import Projections, Sizes

_ROUNDS = 8
_RIDGE = 1e-3  # of the mean of the diagonal of A: the text has few tokens for each neuron


@dataclass(frozen=True)
class RotaryPlanes:
    """Planes start, start + step, ..., `count` of them, of the `n_planes` of a head that rotates all its columns."""

    start: int
    step: int
    count: int
    n_planes: int

    @property
    def indices(self) -> Array:
        """Indices of the planes."""
        return self.start + self.step * np.arange(self.count)

    @property
    def columns(self) -> Array:
        """Columns of a head, in the order of the narrower head: those of plane j are j and n_planes + j."""
        return np.concatenate([self.indices, self.n_planes + self.indices])

    def base(self, base: float) -> float:
        """Return the base of the frequencies of the narrower head."""
        return float(base ** (self.step * self.count / self.n_planes))

    def factor(self, base: float) -> float:
        """Return the factor by which positions are divided."""
        return float(base ** (self.start / self.n_planes))


def choose_planes(losses: Array, count: int) -> RotaryPlanes:
    """Return the equally spaced planes without which most is lost.

    >>> choose_planes(np.array([5.0, 1.0, 4.0, 0.0]), 2).indices.tolist()
    [0, 2]
    """
    return max(_progressions(len(losses), count), key=lambda planes: float(losses[planes.indices].sum()))


def _progressions(n_planes: int, count: int) -> Iterator[RotaryPlanes]:
    widest = (n_planes - 1) // (count - 1) if count > 1 else 1
    for step in range(1, widest + 1):
        for start in range(n_planes - step * (count - 1)):
            yield RotaryPlanes(start, step, count, n_planes)


def truncate_values(projections: Projections, sizes: Sizes, width: int, mixed: Array, slopes: Array) -> Projections:
    """Return projections whose values are 0 from column `width` of every head on, and so the rows of W_O they meet.

    Parameters
    ----------
    projections, sizes
        Of one layer.
    width
        Columns that are kept, at most `sizes.d_value`.
    mixed
        (heads * d_value,) * 2, second moments of the inputs of W_O.
    slopes
        (d_model,) * 2, second moments of the gradients at the output of W_O.
    """
    v, kv_heads, d_value = projections.weights["v"], sizes.kv_heads, sizes.d_value
    values = v.astype(np.float64).reshape(sizes.d_model, kv_heads, d_value)
    biases = projections.biases.get("v", np.zeros(v.shape[1])).astype(np.float64).reshape(kv_heads, d_value)
    outputs = projections.weights["o"].astype(np.float64).reshape(kv_heads, -1, d_value, sizes.d_model)
    new_values, new_biases, new_outputs = np.zeros_like(values), np.zeros_like(biases), np.zeros_like(outputs)
    for g in range(kv_heads):
        on_values, on_outputs = nearest_kronecker_product(_terms(mixed, slopes, outputs[g], g))
        left, right = components(np.eye(d_value), on_values, on_outputs).first(width)
        new_values[:, g, :width], new_biases[g, :width] = values[:, g] @ left, biases[g] @ left  # d [dv] r, [dv] r
        new_outputs[g, :, :width] = right @ outputs[g]  # h r [dv] d
    weights = {"v": new_values.reshape(v.shape), "o": new_outputs.reshape(-1, sizes.d_model)}
    own_biases = {"v": new_biases.ravel().astype(v.dtype)} if "v" in projections.biases else {}
    return projections.updated(Projections({name: w.astype(v.dtype) for name, w in weights.items()}, own_biases))


def _terms(mixed: Array, slopes: Array, outputs: Array, group: int) -> list[tuple[Array, Array]]:
    """Return the Kronecker products of the errors of the heads of one group."""
    n, width, _ = outputs.shape
    terms = []
    for k, output in enumerate(outputs):
        own = slice((group * n + k) * width, (group * n + k + 1) * width)
        terms.append((mixed[own, own].astype(np.float64), output @ slopes @ output.T))  # dv [t] dv; dv [d] dv
    return terms


def choose_neurons(down: Array, reads: Array, slopes: Array, count: int) -> tuple[Array, Array]:
    """Return the indices of the neurons that are kept, ascending, and their rows of W_down.

    Parameters
    ----------
    down
        (neurons, d_model), acting on rows.
    reads, slopes
        (neurons,) * 2 and (d_model,) * 2, second moments of the inputs, and of the gradients at the output.
    count
        Number of neurons to keep.
    """
    moments = reads.astype(np.float64) + _RIDGE * np.trace(reads) / len(reads) * np.eye(len(reads))
    kept, rows = np.arange(len(down)), down.astype(np.float64)
    for left in np.linspace(len(down), count, _ROUNDS + 1)[1:].round().astype(int):
        inverse = np.linalg.inv(moments[np.ix_(kept, kept)])
        losses = np.einsum("id,de,ie->i", rows, slopes, rows, optimize=True) / np.diag(inverse)
        stays = np.sort(np.argsort(-losses, kind="stable")[:left])
        goes = np.setdiff1d(np.arange(len(kept)), stays)
        if not len(goes):
            continue
        # the least-squares rows of the others, by the Schur complement of the inverse
        rows = rows[stays] - inverse[np.ix_(stays, goes)] @ np.linalg.solve(inverse[np.ix_(goes, goes)], rows[goes])
        kept = kept[stays]
    return kept, rows
