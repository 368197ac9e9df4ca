r"""Truncation of the values of a layer to one width for all heads.

Query heads h of one key-value head share the values v = x W_V + b_V; head h reads their mixture y_h, and the layer
writes the sum of y_h W_O^h. With a projection M = L R of rank r in the space of the values, W_V L and R W_O^h take the
place of W_V and W_O^h. The error of one head in the direction of the gradients p at the output is

    E |y_h (1 - M) W_O^h p|^2 = (1 - m)^T (Y_h (x) G_h) (1 - m),

        Y_h = E[y_h^T y_h],   G_h = W_O^h E[p p^T] W_O^hT,   m the entries of M,

as if y_h and p were independent. The sum over the heads of a group is replaced by the nearest Kronecker product
A (x) B, for which the minimum over M of rank r is that of `components`.
"""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import components, nearest_kronecker_product
from tnlib_adapters.factors.projections import Projections, Sizes


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
    values, biases, outputs = (a.astype(np.float64) for a in _by_head(projections, sizes))
    new_values, new_biases, new_outputs = np.zeros_like(values), np.zeros_like(biases), np.zeros_like(outputs)
    for g in range(sizes.kv_heads):
        on_values, on_outputs = nearest_kronecker_product(_terms(mixed, slopes, outputs[g], g))
        left, right = components(np.eye(sizes.d_value), on_values, on_outputs).first(width)
        new_values[g, :, :width], new_biases[g, :width] = values[g] @ left, biases[g] @ left  # d [dv] r, [dv] r
        new_outputs[g, :, :width] = right @ outputs[g]  # h r [dv] d
    weights = {
        "v": new_values.transpose(1, 0, 2).reshape(sizes.d_model, -1),
        "o": new_outputs.reshape(-1, sizes.d_model),
    }
    dtype = projections.weights["v"].dtype
    own_biases = {"v": new_biases.ravel().astype(dtype)} if "v" in projections.biases else {}
    return projections.updated(Projections({name: w.astype(dtype) for name, w in weights.items()}, own_biases))


def _by_head(projections: Projections, sizes: Sizes) -> tuple[Array, Array, Array]:
    """Return W_V (kv_heads, d_model, d_value), b_V (kv_heads, d_value) and W_O (kv_heads, group, d_value, d_model)."""
    v, o, kv_heads = projections.weights["v"], projections.weights["o"], sizes.kv_heads
    bias = projections.biases.get("v", np.zeros(v.shape[1]))
    values = v.reshape(sizes.d_model, kv_heads, sizes.d_value).transpose(1, 0, 2)
    return values, bias.reshape(kv_heads, -1), o.reshape(kv_heads, -1, sizes.d_value, sizes.d_model)


def _terms(mixed: Array, slopes: Array, outputs: Array, group: int) -> list[tuple[Array, Array]]:
    """Return the Kronecker products of the errors of the heads of one group."""
    n, width, _ = outputs.shape
    terms = []
    for k, output in enumerate(outputs):
        own = slice((group * n + k) * width, (group * n + k + 1) * width)
        terms.append((mixed[own, own].astype(np.float64), output @ slopes @ output.T))  # dv [t] dv; dv [d] dv
    return terms
