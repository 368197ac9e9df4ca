"""Singular value decomposition of the QK and OV operators of a head, and maxima of their bilinear forms.

Omega = sum_k s_k u_k v_k^T pairs a query direction u_k with a key direction v_k; OV = sum_k s_k u_k v_k^T maps the
input direction u_k to the output direction v_k. For equal singular values only the two singular subspaces and the map
between them are defined, not the vectors: such a group is a span.

    max over unit x, y of  x Omega y^T  =  the largest singular value, at x = u_1, y = v_1
    max over unit x    of  x Omega x^T  =  the largest eigenvalue of (Omega + Omega^T) / 2,   a Rayleigh quotient

The second is the Courant-Fischer maximum of the symmetric part. It is at most the first, equal only where u_1 = v_1,
and is uninformative for a head with different queries and keys. Neither is an eigenvalue of Omega.

With Omega = A B^T and [A B] = Q R, (Omega + Omega^T) / 2 = Q R (J / 2) R^T Q^T, where J exchanges the two blocks: an
eigenproblem of size 2 d_head. The form is zero on the orthogonal complement.

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

import tnlib
from tnlib import ArgumentError, ArgumentTypeError, LowRank
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_rtol
from tnlib.linalg.canonical_basis import leading_phases
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scaling import largest, norm
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import noise_level
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.circuits.arguments import check_square_form


@dataclass(frozen=True, eq=False, repr=False)
class SingularVectors:
    """Singular value decomposition, grouped by equal singular values; returned by `singular_vectors`.

    Parameters
    ----------
    values
        (r,), descending.
    left
        (m, r), orthonormal columns: query directions, or directions that values read.
    right
        (r, n), orthonormal rows: key directions, or output directions.
    groups
        Slices that cover all values in order: of length 1 for a simple value, longer for equal values.

    References
    ----------
    B. Millidge, S. Black, "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable"
    (2022).

    Examples
    --------
    Two equal singular values define a plane:

    >>> import numpy as np, tnlib
    >>> found = singular_vectors(tnlib.LowRank(np.diag([2.0, 1.0, 1.0]), np.eye(3)))
    >>> found.spans, f"{found.effective_rank:.3f}"
    ((slice(1, 3, None),), '2.000')
    """

    values: Array
    left: Array
    right: Array
    groups: tuple[slice, ...]

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def spans(self) -> tuple[slice, ...]:
        """The groups of more than one value, which define a subspace only."""
        return tuple(group for group in self.groups if group.stop - group.start > 1)

    @property
    def effective_rank(self) -> float:
        r"""Participation ratio of the singular values, from 1 to r; 0 of a zero operator.

        .. math:: (\sum_k s_k^2)^2 / \sum_k s_k^4
        """
        return float(effective_rank(self.values))

    def __repr__(self) -> str:
        leading = ", ".join(f"{value:.4g}" for value in self.values[:4])
        more = ", ..." if len(self.values) > 4 else ""
        spans = f", {len(self.spans)} spans" if self.spans else ""
        return f"SingularVectors({len(self.values)} singular values {leading}{more}{spans})"


def effective_rank(values: Array) -> Array:
    """Return the participation ratio (sum s^2)^2 / sum s^4 over the last axis; 0 for a zero operator.

    >>> effective_rank(np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    array([2., 1., 0.])
    """
    top = values.max(axis=-1, keepdims=True, initial=0.0)
    squares = np.square(values / np.where(top > 0, top, 1))
    total, of_squares = squares.sum(axis=-1), np.square(squares).sum(axis=-1)
    return np.asarray(np.where(total > 0, total**2 / np.where(total > 0, of_squares, 1), 0.0))


@single_threaded_blas
def singular_vectors(operator: LowRank, *, rtol: float | None = None) -> SingularVectors:
    """Return the singular value decomposition of a bilinear form or a map; equal singular values form spans.

    Parameters
    ----------
    operator
        `attention.qk(head)` or `attention.ov(head)`; the product is never formed. The last coordinate is the constant
        1: biases are part of the singular vectors.
    rtol
        Singular values are equal if they differ by less than `rtol` times the Frobenius norm. None: 24 eps, as
        elsewhere in tnlib. Use a larger value to group values that rounding or training has separated.

    Returns
    -------
    SingularVectors
        Truncated at the numerical rank; empty for a zero operator. Signs are fixed by the left vectors.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `operator` is not a LowRank, or `rtol` is invalid.

    References
    ----------
    B. Millidge, S. Black, "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable"
    (2022).

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(1)
    >>> found = singular_vectors(layer.ov(2))
    >>> len(found), found.left.shape
    (16, (65, 16))
    """
    if not isinstance(operator, LowRank):
        raise ArgumentTypeError(
            f"singular_vectors: operator must be a LowRank, got {type(operator).__name__}; "
            "pass attention.qk(head) or attention.ov(head)."
        )
    rtol = as_rtol("singular_vectors", rtol)
    u, s, vh = tnlib.convert(operator, tnlib.SVD)
    rank = int(np.count_nonzero(s > noise_level(norm(s), s.dtype, min(operator.shape))))
    u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    groups, start = [], 0
    for span in tnlib.degenerate_groups(s, rtol=rtol) if rank else ():
        groups += [slice(k, k + 1) for k in range(start, span.start)] + [span]
        start = span.stop
    return SingularVectors(s, u, vh, (*groups, *(slice(k, k + 1) for k in range(start, len(s)))))


@dataclass(frozen=True, eq=False, repr=False)
class Maximum:
    r"""Maxima of a bilinear form over unit vectors, returned by `form_maximum`.

    Parameters
    ----------
    value
        Maximum of :math:`x \Omega y^T` over unit x and y, the largest singular value.
    left, right
        (d_model + 1,), singular vectors that attain it; one choice of several if the singular value is degenerate.
    symmetric, lowest
        Maximum and minimum of :math:`x \Omega x^T` over unit x.
    direction
        (d_model + 1,), eigenvector that attains `symmetric`.

    References
    ----------
    R. A. Horn and C. R. Johnson, "Matrix Analysis" (2nd ed., 2013), theorems 4.2.6 (Courant-Fischer) and 7.3.8.

    Examples
    --------
    Queries that read the first feature, for keys that read the second one:

    >>> import numpy as np, tnlib
    >>> found = form_maximum(tnlib.LowRank(2 * np.eye(3)[:, :1], np.eye(3)[1:2]))
    >>> found
    Maximum(2 over pairs of unit vectors; of one with itself from -1 to 1)
    >>> (found.direction**2).round(6)
    array([0.5, 0.5, 0. ])
    """

    value: float
    left: Array
    right: Array
    symmetric: float
    lowest: float
    direction: Array

    def __repr__(self) -> str:
        return (
            f"Maximum({self.value:.4g} over pairs of unit vectors; of one with itself from {self.lowest:.4g} to "
            f"{self.symmetric:.4g})"
        )


def form_maximum(form: LowRank) -> Maximum:
    r"""Return the maximum of :math:`x \Omega y^T` and the extremes of :math:`x \Omega x^T` over unit vectors.

    Parameters
    ----------
    form
        (d, d), for example `attention.qk(head)`; `tnlib.LowRank(form.left[:-1], form.right[:, :-1])` excludes the
        biases. The product is never formed.

    Returns
    -------
    Maximum
        `value` >= max(`symmetric`, -`lowest`).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `form` is not a real square LowRank.

    References
    ----------
    R. A. Horn and C. R. Johnson, "Matrix Analysis" (2nd ed., 2013), theorems 4.2.6 (Courant-Fischer) and 7.3.8.

    Examples
    --------
    A head whose queries match the negative of their own direction:

    >>> import numpy as np, tnlib
    >>> form_maximum(tnlib.LowRank(np.eye(3)[:, :1], -3 * np.eye(3)[:1]))
    Maximum(3 over pairs of unit vectors; of one with itself from -3 to 0)
    """
    check_square_form("form_maximum", form)
    operator = singular_vectors(form)
    left, right = (operator.left[:, 0], operator.right[0]) if len(operator) else (np.zeros(form.shape[0]),) * 2
    values, vectors = _symmetric_part(form)
    if len(values) < form.shape[0]:  # the form vanishes on the orthogonal complement of both sides
        values, vectors = np.append(values, 0.0), np.column_stack([vectors, _orthogonal_to(vectors)])
    lowest, highest = np.argsort(values, kind="stable")[[0, -1]]
    return Maximum(
        value=float(operator.values[0]) if len(operator) else 0.0,
        left=left,
        right=right,
        symmetric=float(values[highest]),
        lowest=float(values[lowest]),
        direction=vectors[:, highest] * leading_phases(vectors[:, [highest]])[0],
    )


def minmax_values(form: LowRank) -> Array:
    r"""Return the Courant-Fischer min-max values of :math:`x \Omega x^T` over unit vectors, (d,), descending.

    They are all eigenvalues of :math:`(\Omega + \Omega^T) / 2`. The k-th is the maximum, over subspaces of dimension k,
    of the minimum over their unit vectors. The singular values play this role for pairs: :math:`\sigma_k` is the
    maximum over pairs of subspaces of dimension k.

    Parameters
    ----------
    form
        (d, d), for example `attention.qk(head)`. The product is never formed: the cost is that of an eigenproblem of
        twice the rank, and all but twice the rank of the values are 0.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `form` is not a real square LowRank.

    References
    ----------
    R. A. Horn and C. R. Johnson, "Matrix Analysis" (2nd ed., 2013), theorem 4.2.6.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> form = tnlib.LowRank(np.diag([3.0, 1.0, -2.0, 0.0])[:, :3], np.eye(4)[:3])
    >>> minmax_values(form).round(6)
    array([ 3.,  1.,  0., -2.])
    """
    check_square_form("minmax_values", form)
    values = _symmetric_part(form)[0]
    return np.sort(np.append(values, np.zeros(form.shape[0] - len(values))))[::-1]


def _symmetric_part(form: LowRank) -> tuple[Array, Array]:
    """Return eigenvalues of (Omega + Omega^T) / 2, ascending, and eigenvectors (d, n), n <= 2 r; the others are 0."""
    r = form.ranks[0]
    a, b = form.left / (largest(form.left) or 1), form.right.T / (largest(form.right) or 1)
    scale = float(largest(form.left) * largest(form.right))
    q, t = qr_positive(np.hstack([a, b]))
    inner = t[:, :r] @ t[:, r:].T  # k [r] k
    values, vectors = np.linalg.eigh((inner + inner.T) / 2)
    return scale * values, q @ vectors


def _orthogonal_to(q: Array) -> Array:
    """Return a unit vector orthogonal to the columns of q (d, k), k < d: the projected axis of largest residual."""
    axis = np.zeros(len(q), q.dtype)
    axis[int(np.square(q).sum(axis=1).argmin())] = 1
    for _ in range(2):  # project twice for orthogonality to roundoff
        axis = axis - q @ (q.T @ axis)
    return np.asarray(axis / np.linalg.norm(axis))


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

    References
    ----------
    C. Eckart and G. Young, "The approximation of one matrix by another of lower rank", Psychometrika 1 (1936).

    Examples
    --------
    Two positions that match themselves, with scores 4 and 3; the mean over keys is left out:

    >>> import numpy as np, tnlib
    >>> form = tnlib.LowRank(np.diag([4.0, 3.0, 0.0])[:, :2], np.eye(3)[:2])
    >>> text_directions(form, np.eye(2)).scores(1).round(6)
    array([[ 2. , -2. ],
           [-1.5,  1.5]])
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

    The mean over keys is subtracted from the scores of every query: softmax does not see it.

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
    >>> inputs = run(model, np.arange(40)).inputs[0][0]
    >>> found = text_directions(model.attention(0).qk(3), inputs)
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
    if len(x) < 2:
        raise ArgumentError(
            f"text_directions: inputs must have at least two positions, got {len(x)}, whose score softmax ignores; "
            "pass a longer text."
        )
    left, right = x @ form.left, (x - x.mean(axis=0)) @ form.right.T  # n r
    svd = singular_vectors(LowRank(left, right.T))
    queries, keys = svd.left, svd.right.T
    return TextDirections(
        values=svd.values,
        queries=queries,
        keys=keys,
        query_directions=form.left @ (right.T @ keys) / svd.values,  # left right^T v = s u
        key_directions=form.right.T @ (left.T @ queries) / svd.values,
    )
