r"""Singular directions of the scores of a head on a text.

The singular vectors of Omega are best over all unit vectors, whether the text has them or not. Those of the matrix of
scores on a text are best on the text: with inputs X~ (n, d + 1) of the layer in homogeneous coordinates,

    X~ Omega X~^T  =  sum_k s_k a_k b_k^T        a_k, b_k orthonormal, (n,)

a_k is the strength of the k-th feature at every position as a query, b_k as a key. Of rank at most d_head, they come
from the factors X~ W_Q and X~ W_K; for every k, no other sum of k products is nearer to the scores (Eckart and Young).
The directions in the stream are those whose inner products with the inputs are a_k and b_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, LowRank
from tnlib._typing import Array
from tnlib._validate import as_array, as_count
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.circuits.arguments import check_square_form
from tnlib_adapters.circuits.heads.singular_vectors import singular_vectors


@dataclass(frozen=True, eq=False, repr=False)
class TextDirections:
    """Singular value decomposition of the scores of a head on a text, returned by `text_directions`.

    Parameters
    ----------
    values
        (r,), descending: singular values of the scores.
    queries, keys
        (n, r), orthonormal columns: the strength of every feature at every position, as a query and as a key.
    query_directions, key_directions
        (d + 1, r): directions of the input of the layer, whose inner products with the inputs are `queries` and `keys`.
    """

    values: Array
    queries: Array
    keys: Array
    query_directions: Array
    key_directions: Array

    @property
    def shares(self) -> Array:
        """Share of every feature in the sum of the squared scores, (r,)."""
        return np.asarray(self.values**2 / (np.square(self.values).sum() or 1.0))

    def scores(self, count: int) -> Array:
        """Return the sum of the leading `count` features, (n, n)."""
        k = as_count("TextDirections.scores", "count", count)
        return np.asarray((self.queries[:, :k] * self.values[:k]) @ self.keys[:, :k].T)

    def top(self, k: int, count: int = 5) -> tuple[list[int], list[int]]:
        """Return the `count` positions at which feature k, from 0, is largest in modulus, as a query and as a key."""
        k = as_index("TextDirections.top", "k", k, len(self.values))
        count = as_count("TextDirections.top", "count", count)
        chosen = (np.argsort(-np.abs(side[:, k]), kind="stable")[:count] for side in (self.queries, self.keys))
        queries, keys = (positions.tolist() for positions in chosen)
        return queries, keys

    def __repr__(self) -> str:
        shown = ", ".join(f"{share:.0%}" for share in self.shares[:4])
        return f"TextDirections({len(self.values)} features on {len(self.queries)} positions, shares {shown}, ...)"


@single_threaded_blas
def text_directions(form: LowRank, inputs: ArrayLike) -> TextDirections:
    """Return the features of a text that a head matches: the singular value decomposition of its scores on the text.

    Parameters
    ----------
    form
        (d + 1, d + 1), `attention.qk(head)`, or (d, d) without biases. The scale of the scores is not part of it. With
        rotary embeddings, `attention.qk(head, distance)`: the scores as if all pairs had this distance.
    inputs
        (n, d), the inputs of the layer at every position, `run(model, tokens).inputs[layer][0]`.

    Returns
    -------
    TextDirections
        At the numerical rank, at most d_head. Signs are fixed by the queries. All pairs of positions count, those that
        a causal mask excludes too.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `form` is not a real square LowRank, or `inputs` are complex or do not fit it.

    References
    ----------
    C. Eckart and G. Young, "The approximation of one matrix by another of lower rank", Psychometrika 1 (1936).

    Examples
    --------
    The previous-token head of the built-in model matches positions, one feature for every wave length:

    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = text_directions(model.attention(0).qk(3), run(model, np.arange(40)).inputs[0][0])
    >>> found.queries.shape, bool(found.shares[:4].sum() > 0.8)
    ((40, 16), True)
    """
    check_square_form("text_directions", form)
    x = as_array("text_directions", "inputs", inputs, ndim=2)
    if x.dtype.kind == "c":
        raise ArgumentError(
            f"text_directions: inputs must be real, got {x.dtype}; pass run(model, tokens).inputs[layer][0]."
        )
    x = x.astype(np.float64)
    if x.shape[1] == form.shape[0] - 1:
        x = np.column_stack([x, np.ones(len(x))])
    if form.shape != (x.shape[1], x.shape[1]):
        raise ArgumentError(
            f"text_directions: inputs must have shape (n, {form.shape[0] - 1}) for a form of shape {form.shape}, got "
            f"{np.shape(inputs)}; pass run(model, tokens).inputs[layer][0]."
        )
    left, right = x @ form.left, x @ form.right.T  # n r
    svd = singular_vectors(LowRank(left, right.T))
    queries, keys = svd.left, svd.right.T
    return TextDirections(
        values=svd.values,
        queries=queries,
        keys=keys,
        query_directions=form.left @ (right.T @ keys) / svd.values,  # left right^T v = s u
        key_directions=form.right.T @ (left.T @ queries) / svd.values,
    )
