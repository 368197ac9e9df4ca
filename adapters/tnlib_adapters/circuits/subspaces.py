r"""Which parts of the stream heads read and write, and how far those of two heads overlap.

Of subspaces with orthonormal bases U (d, p) and V (d, q) the singular values of U^T V are the cosines of the principal
angles. Their overlap is the mean squared cosine,

    ||U^T V||^2 / min(p, q),    from 0, orthogonal, to 1, one inside the other.

If one of the two is turned by a uniformly random rotation of n dimensions, its projector P has E P = 1 p / n and

    E ||U^T V||^2 = tr E[P] Q = p q / n,      Var ||U^T V||^2 = 2 p q (n - p) (n - q) / (n^2 (n - 1) (n + 2))

so that an overlap reads as a number of standard deviations above chance, and with nothing drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

import tnlib
from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.linalg.threads import matmul, own_threads
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.attention.index import as_index
from tnlib_adapters.attention.residual_product import Head
from tnlib_adapters.circuits.layers import as_layers, has_layer_norm

Side = Literal["Q", "K", "V", "O"]


@dataclass(frozen=True, eq=False, repr=False)
class Angles:
    """Two subspaces beside each other; made by `principal_angles`.

    Parameters
    ----------
    angles
        (min(p, q),), in radians, ascending: 0 where the two share a direction.
    overlap
        The mean of cos^2.
    chance, deviation
        Mean and standard deviation of the overlap over random rotations between the two.
    """

    angles: Array
    overlap: float
    chance: float
    deviation: float

    @property
    def sigmas(self) -> float:
        """How many standard deviations the overlap lies above chance; 0 where nothing is left to chance."""
        return (self.overlap - self.chance) / self.deviation if self.deviation else 0.0

    def __repr__(self) -> str:
        least = f"{math.degrees(self.angles[0]):.1f}" if len(self.angles) else "none"
        return (
            f"Angles({len(self.angles)} from {least} degrees, overlap {self.overlap:.3f}, chance {self.chance:.3f}, "
            f"{self.sigmas:+.1f} sigma)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Overlaps:
    """Overlaps of the subspaces of all heads; made by `subspace_overlaps`.

    Parameters
    ----------
    sides
        What of the first head and what of the second: "Q", "K", "V" or "O".
    overlaps, chance, deviation
        (layers, heads, layers, heads): the mean squared cosine, its mean and its standard deviation over random
        rotations between the two.
    """

    sides: tuple[Side, Side]
    overlaps: Array
    chance: Array
    deviation: Array

    @property
    def sigmas(self) -> Array:
        """How many standard deviations above chance; 0 where nothing is left to chance."""
        some = self.deviation > 0
        return np.where(some, (self.overlaps - self.chance) / np.where(some, self.deviation, 1), 0.0)

    def largest(self, n: int) -> list[tuple[Head, Head, float]]:
        """Return the n pairs of different heads that overlap most, and by how much; of equal sides each pair once."""
        shape = self.overlaps.shape
        heads = shape[0] * shape[1]
        flat = self.overlaps.reshape(heads, heads)
        kept = ~np.eye(heads, dtype=bool)
        if self.sides[0] == self.sides[1]:
            kept = np.triu(kept)
        order = np.argsort(np.where(kept, -flat, np.inf), axis=None, kind="stable")[: min(n, int(kept.sum()))]
        pairs = [divmod(int(k), heads) for k in order]
        return [(divmod(i, shape[1]), divmod(j, shape[1]), float(flat[i, j])) for i, j in pairs]

    def __repr__(self) -> str:
        lines = [f"Overlaps of {self.sides[0]} with {self.sides[1]}", "    head    head overlap  chance   sigma"]
        for one, other, overlap in self.largest(5):
            at = (*one, *other)
            names = "".join(f"{f'{layer}.{head}':>8}" for layer, head in (one, other))
            lines.append(f"{names}{overlap:>8.3f}{self.chance[at]:>8.3f}{self.sigmas[at]:>+8.1f}")
        return "\n".join(lines)


def head_subspace(layer: Attention, head: int, side: Side) -> Array:
    """Return an orthonormal basis (d_model, rank) of what a head reads by its queries, keys or values, or writes.

    Parameters
    ----------
    layer, head
        Query heads that share keys and values share those subspaces.
    side
        "Q", "K" or "V" for reading, "O" for writing. Biases are no directions that are read, and left out.

    Raises
    ------
    ArgumentError
        If there is no such head or side.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> head_subspace(layer, 3, "O").shape
    (64, 16)
    """
    _check_side("head_subspace", side)
    return _basis(layer, as_index("head_subspace", "head", head, layer.n_heads), side, centred=False)


def principal_angles(one: Array, other: Array) -> Angles:
    """Return the angles between the spaces that the columns of two matrices span, beside what chance would give.

    Parameters
    ----------
    one, other
        (d, p) and (d, q), of any rank.

    Raises
    ------
    ArgumentError
        If they are no matrices of one height.

    References
    ----------
    A. Bjorck and G. H. Golub, "Numerical methods for computing angles between linear subspaces" (1973).

    Examples
    --------
    >>> import numpy as np
    >>> principal_angles(np.eye(6)[:, :2], np.eye(6)[:, 1:3])
    Angles(2 from 0.0 degrees, overlap 0.500, chance 0.333, +0.6 sigma)
    """
    from scipy.linalg import subspace_angles

    a, b = (as_array("principal_angles", name, x, ndim=2) for name, x in (("one", one), ("other", other)))
    if len(a) != len(b):
        raise ArgumentError(
            f"principal_angles: one and other must have columns of one size, got shapes {a.shape} and {b.shape}; "
            "pass bases in one space."
        )
    u, v = (_span(x) for x in (a, b))
    (p, q), n = (u.shape[1], v.shape[1]), len(a)
    mean, deviation = _by_chance(np.array(p), np.array(q), n)
    if not min(p, q):
        return Angles(np.zeros(0), 0.0, 0.0, 0.0)
    overlap = float(np.square(u.T.conj() @ v).sum()) / min(p, q)
    return Angles(subspace_angles(u, v)[::-1], overlap, float(mean), float(deviation))


@own_threads
def subspace_overlaps(
    model: Checkpoint | Sequence[Attention], one: Side, other: Side, *, centred: bool | None = None
) -> Overlaps:
    """Return how far what every head reads or writes overlaps with what every other one does.

    `subspace_overlaps(model, "O", "K")` compares what heads write with what keys are made of: composition without the
    strengths, for which see `compositions`.

    Parameters
    ----------
    model
        A checkpoint, or its attention layers. Of a model with norms pass `fold(model).checkpoint`.
    one, other
        "Q", "K", "V" or "O".
    centred
        Whether the mean over features counts for nothing; as in `compositions`.

    Returns
    -------
    Overlaps
        `overlaps`, `chance`, `deviation`, `sigmas`, each (layers, heads, layers, heads); of all pairs, whichever layer
        comes first.

    Raises
    ------
    ArgumentError
        If layers differ in their sizes, or a side is not known.

    Examples
    --------
    >>> import tnlib_adapters
    >>> found = subspace_overlaps(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), "O", "K")
    >>> bool(found.sigmas[0, 3, 1].min() > 5)  # induction heads have keys where the previous-token head writes
    True
    """
    for side in (one, other):
        _check_side("subspace_overlaps", side)
    layers = as_layers("subspace_overlaps", model)
    centred = has_layer_norm(model) if centred is None else centred
    (u, p), (v, q) = (_bases(layers, side, centred) for side in (one, other))  # head r d, (head,)
    n = layers[0].d_model - int(centred)
    squares = np.concatenate([_squares(part, v) for part in np.split(u, len(layers))])
    least = np.maximum(np.minimum(p[:, None], q), 1)
    mean, deviation = _by_chance(p[:, None], q[None], n)
    shape = (len(layers), layers[0].n_heads) * 2
    return Overlaps((one, other), *(a.reshape(shape) for a in (squares / least, mean, deviation)))


def _by_chance(p: Array, q: Array, n: int) -> tuple[Array, Array]:
    """Return mean and standard deviation of the overlap of random subspaces of p and q among n dimensions."""
    least = np.maximum(np.minimum(p, q), 1)
    variance = 2.0 * p * q * (n - p) * (n - q) / (n**2 * max(n - 1, 1) * (n + 2))
    return p * q / n / least, np.sqrt(np.maximum(variance, 0)) / least


def _squares(u: Array, v: Array) -> Array:
    """Return ||u[h] v[k]^T||^2, (h, k)."""
    (h, r, d), (k, s, _) = u.shape, v.shape
    products = np.square(matmul(u.reshape(h * r, d), v.reshape(k * s, d).T))  # (h r) [d] (k s)
    return np.asarray(products.reshape(h, r, k, s).sum(axis=1, dtype=np.float64).sum(axis=2))  # h [r] k [s]


def _bases(layers: Sequence[Attention], side: Side, centred: bool) -> tuple[Array, Array]:
    """Return bases as rows (head, d_head, d_model), zeros below the rank of each, and the ranks (head,)."""
    found, ranks = [], []
    for layer in layers:
        shared = layer.n_heads // layer.kv_heads if side in "KV" else 1
        own = [_basis(layer, head, side, centred) for head in range(0, layer.n_heads, shared)]
        for basis in own:
            rows = np.zeros((layer.d_head, layer.d_model), basis.dtype)
            rows[: basis.shape[1]] = basis.T
            found += [rows] * shared
            ranks += [basis.shape[1]] * shared
    return np.stack(found), np.array(ranks)


def _basis(layer: Attention, head: int, side: Side, centred: bool) -> Array:
    shared = layer.n_heads // layer.kv_heads if side in "KV" else 1
    w: Array = getattr(layer, f"W_{side}")[head // shared]
    columns = w.T if side == "O" else w  # d dh
    return _span(columns - columns.mean(axis=0) if centred else columns)


def _span(columns: Array) -> Array:
    """Return an orthonormal basis of the columns, as many as their numerical rank; none of zeros."""
    if not columns.size or not columns.any():
        return columns[:, :0]
    return np.asarray(tnlib.svd(columns).value.u)


def _check_side(function: str, side: str) -> None:
    if side not in get_args(Side):
        raise ArgumentError(f"{function}: side must be 'Q', 'K', 'V' or 'O', got {side!r}; choose one.")
