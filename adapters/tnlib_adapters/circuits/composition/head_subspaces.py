r"""Principal angles between subspaces, and overlaps of the subspaces that heads read and write.

Let U (d, p) and V (d, q) be orthonormal bases. The singular values of U^T V are the cosines of the principal angles.
The overlap of the two subspaces is the mean squared cosine,

    ||U^T V||^2 / min(p, q),    from 0 (orthogonal) to 1 (one contains the other).

If a uniformly random rotation of n dimensions turns one of the two, its projector P has E P = 1 p / n and

    E ||U^T V||^2 = tr E[P] Q = p q / n,      Var ||U^T V||^2 = 2 p q (n - p) (n - q) / (n^2 (n - 1) (n + 2))

which gives the overlap as a number of standard deviations above chance without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

import tnlib
from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, check_choice
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import noise_level, numerical_rank
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.arguments import as_folded_layers, as_head, head_name
from tnlib_adapters.circuits.composition.pair_norms import padded_stack, pair_norms, quotient
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.result_table import Columns, Table, descending

Side = Literal["Q", "K", "V", "O"]


@dataclass(frozen=True, eq=False, repr=False)
class Angles:
    """Principal angles between two subspaces, returned by `principal_angles`.

    Parameters
    ----------
    angles
        (min(p, q),), in radians, ascending; 0 for a shared direction.
    overlap
        Mean of the squared cosines of the angles.
    chance, deviation
        Mean and standard deviation of the overlap if one subspace is rotated uniformly at random.

    References
    ----------
    A. Bjorck and G. H. Golub, "Numerical methods for computing angles between linear subspaces" (1973).

    Examples
    --------
    A line at 45 degrees to a plane, in four dimensions:

    >>> import numpy as np
    >>> found = principal_angles(np.array([[1.0], [0.0], [1.0], [0.0]]), np.eye(4)[:, :2])
    >>> np.degrees(found.angles).round(6), f"{found.overlap:.3f}, chance {found.chance:.3f}"
    (array([45.]), '0.500, chance 0.500')
    """

    angles: Array
    overlap: float
    chance: float
    deviation: float

    @property
    def sigmas(self) -> float:
        """Overlap minus chance in standard deviations; 0 where the deviation is 0."""
        return (self.overlap - self.chance) / self.deviation if self.deviation else 0.0

    def __repr__(self) -> str:
        least = f"{math.degrees(self.angles[0]):.1f}" if len(self.angles) else "none"
        return (
            f"Angles({len(self.angles)} from {least} degrees, overlap {self.overlap:.3f}, chance {self.chance:.3f}, "
            f"{self.sigmas:+.1f} sigma)"
        )


def principal_angles(one: Array, other: Array) -> Angles:
    """Return the principal angles between the column spaces of two matrices, with the values expected by chance.

    Parameters
    ----------
    one, other
        (d, p) and (d, q), of any rank.

    Raises
    ------
    ArgumentError
        If the two are not matrices with equally many rows.

    References
    ----------
    A. Bjorck and G. H. Golub, "Numerical methods for computing angles between linear subspaces" (1973).

    Examples
    --------
    >>> import numpy as np
    >>> principal_angles(np.eye(6)[:, :2], np.eye(6)[:, 1:3])
    Angles(2 from 0.0 degrees, overlap 0.500, chance 0.333, +1.1 sigma)
    """
    a, b = (as_array("principal_angles", name, x, ndim=2) for name, x in (("one", one), ("other", other)))
    if len(a) != len(b):
        raise ArgumentError(
            f"principal_angles: one and other must have columns of one size, got shapes {a.shape} and {b.shape}; "
            "pass bases in one space."
        )
    u, v = sorted((span(x) for x in (a, b)), key=lambda x: -x.shape[1])
    (p, q), n = (u.shape[1], v.shape[1]), len(a)
    mean, deviation = overlap_by_chance(np.array(p), np.array(q), n)
    if not min(p, q):
        return Angles(np.zeros(0), 0.0, 0.0, 0.0)
    inside = u.T.conj() @ v
    overlap = float(np.square(inside).sum()) / min(p, q)
    # Small angles have accurate sines, others accurate cosines. scipy.linalg.subspace_angles takes the wrong one of the
    # two where both kinds occur: 0 for an angle of 1e-9 beside one of 1.5.
    cosines, sines = (np.linalg.svd(x, compute_uv=False) for x in (inside, v - u @ inside))
    return Angles(np.arctan2(sines[::-1], cosines), overlap, float(mean), float(deviation))


def overlap_by_chance(p: Array, q: Array, n: int) -> tuple[Array, Array]:
    """Return mean and standard deviation of the overlap of random p- and q-dimensional subspaces of n dimensions."""
    least = np.maximum(np.minimum(p, q), 1)
    variance = 2.0 * p * q * (n - p) * (n - q) / (n**2 * max(n - 1, 1) * (n + 2))
    return p * q / n / least, np.sqrt(np.maximum(variance, 0)) / least


def span(columns: Array) -> Array:
    """Return an orthonormal basis of the column space, (d, numerical rank)."""
    if not columns.size or not columns.any():
        return columns[:, :0]
    q, r = np.linalg.qr(columns)
    s = np.linalg.svd(r, compute_uv=False)
    rank = numerical_rank(s, noise_level(float(np.linalg.norm(s)), s.dtype, len(s)))
    return np.asarray(q if rank == len(s) else tnlib.svd(columns).value.u)


@dataclass(frozen=True, eq=False, repr=False)
class Overlaps(Table):
    """Overlaps of the subspaces of all pairs of heads, returned by `subspace_overlaps`.

    Parameters
    ----------
    sides
        Subspace of the first and of the second head: "Q", "K", "V" or "O".
    overlaps, chance, deviation
        (layers, heads, layers, heads): mean squared cosine of the principal angles, and its mean and standard deviation
        over random rotations between the two.
    notes
        Sentences on norms that were folded into the heads, or could not be.

    References
    ----------
    A. Bjorck and G. H. Golub, "Numerical methods for computing angles between linear subspaces" (1973).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = subspace_overlaps(model, "O", "K")
    >>> found.overlaps[0, 3, 1].round(1), f"{found.chance[0, 3, 1, 0]:.2f}"
    (array([0.7, 0.8, 0.8, 0.8]), '0.25')
    """

    sides: tuple[Side, Side]
    overlaps: Array
    chance: Array
    deviation: Array
    notes: tuple[str, ...] = ()

    _FORMATS: ClassVar = {"sigma": "+.1f"}
    _SHOWN = 5

    @property
    def sigmas(self) -> Array:
        """Overlap minus chance in standard deviations; 0 where the deviation is 0."""
        return quotient(self.overlaps - self.chance, self.deviation)

    def largest(self, n: int) -> list[tuple[Head, Head, float]]:
        """Return the n pairs of different heads with the largest overlap; for equal sides every pair once."""
        count = as_count("Overlaps.largest", "n", n, least=0)
        at = np.unravel_index(self._pairs[:count], self.overlaps.shape)
        rows = zip(*(indices.tolist() for indices in at), self.overlaps[at].tolist(), strict=True)
        return [((a, b), (c, d), overlap) for a, b, c, d, overlap in rows]

    @property
    def _pairs(self) -> Array:
        """Flat indices of all pairs of different heads, the largest overlap first; for equal sides every pair once."""
        return largest_pairs(self.overlaps, every=self.sides[0] != self.sides[1])

    @property
    def _title(self) -> str:
        return f"Overlaps of {self.sides[0]} with {self.sides[1]}"

    def _columns(self, rows: Any) -> Columns:
        at = np.unravel_index(self._pairs[rows], self.overlaps.shape)
        first, second = ([head_name(head) for head in zip(*side, strict=True)] for side in (at[:2], at[2:]))
        numbers = {"overlap": self.overlaps[at], "chance": self.chance[at], "sigma": self.sigmas[at]}
        return {"first": first, "second": second, **numbers}


def largest_pairs(values: Array, *, every: bool) -> Array:
    """Return flat indices of pairs of different heads by values (layers, heads, layers, heads), largest first.

    Without `every`, of the two orders of a pair only the first.
    """
    heads = math.prod(values.shape[:2])
    candidates = ~np.eye(heads, dtype=bool)
    if not every:
        candidates = np.triu(candidates)
    flat = np.where(candidates, values.reshape(heads, heads), -np.inf)
    return descending(flat, int(candidates.sum()))


def head_subspace(layer: Attention, head: int, side: Side) -> Array:
    """Return an orthonormal basis (d_model, rank) of the subspace that a head reads or writes.

    Parameters
    ----------
    layer, head
        Layer, and index of the query head. Query heads of one group share the key and value subspaces.
    side
        "Q", "K" or "V" for the queries, keys or values (read), "O" for the output (written). Biases are ignored.

    Raises
    ------
    ArgumentError
        If there is no such head, or `side` is invalid.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> head_subspace(layer, 3, "O").shape
    (64, 16)
    """
    check_choice("head_subspace", "side", side, get_args(Side))
    return _basis(layer, as_head("head_subspace", layer, head), side, centred=False)


@accepts_models
def subspace_overlaps(
    model: Checkpoint | Sequence[Attention], one: Side, other: Side, *, centred: bool | None = None
) -> Overlaps:
    """Return the overlaps of the subspaces that all pairs of heads read or write.

    `subspace_overlaps(model, "O", "K")` compares head outputs with key inputs: composition without magnitudes; see
    `compositions` for scores with magnitudes.

    Parameters
    ----------
    model
        A checkpoint or transformers model, or attention layers. Norms before the attention of a model are folded, as in
        `compositions`.
    one, other
        "Q", "K", "V" or "O".
    centred
        Whether the mean over features is projected out, as in `compositions`.

    Returns
    -------
    Overlaps
        `overlaps`, `chance`, `deviation`, `sigmas`, each (layers, heads, layers, heads), for all pairs in any order of
        layers, and `notes` on what was folded.

    Raises
    ------
    ArgumentError
        If layers differ in shape, or a side is invalid.

    References
    ----------
    A. Bjorck and G. H. Golub, "Numerical methods for computing angles between linear subspaces" (1973).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = subspace_overlaps(model, "O", "K")
    >>> # standard deviations: induction heads have keys where head 0.3 writes
    >>> found.sigmas[0, 3, 1].round()
    array([30., 32., 32., 31.])
    """
    for side in (one, other):
        check_choice("subspace_overlaps", "side", side, get_args(Side))
    layers, centred, notes, _ = as_folded_layers("subspace_overlaps", model, centred)
    return overlaps_with(layers, one, [other], centred, notes)[0]


@single_threaded_blas
def overlaps_with(
    layers: Sequence[Attention], one: Side, others: Sequence[Side], centred: bool, notes: tuple[str, ...] = ()
) -> list[Overlaps]:
    """Return the overlaps of one kind of subspace with each of several others; its bases are computed once."""
    (u, p), (v, q) = (_bases(layers, sides, centred) for sides in ([one], others))
    inside = np.square(pair_norms(u, v)) / np.maximum(np.minimum(p[:, None], q), 1)
    of_bases = (inside, *overlap_by_chance(p[:, None], q[None], layers[0].d_model - int(centred)))
    shape = (len(layers), layers[0].n_heads) * 2
    results, stop = [], 0
    for other in others:
        start, stop = stop, stop + len(layers) * len(_distinct(layers[0], other))
        times = [math.prod(shape[:2]) // count for count in (len(u), stop - start)]  # heads that share a basis
        overlap, chance, deviation = (
            a[:, start:stop].repeat(times[0], 0).repeat(times[1], 1).reshape(shape) for a in of_bases
        )
        results.append(Overlaps((one, other), overlap, chance, deviation, notes))
    return results


def _bases(layers: Sequence[Attention], sides: Sequence[Side], centred: bool) -> tuple[Array, Array]:
    """Return bases as rows (sides layers heads, rank, d_model), padded with zeros, and their ranks."""
    bases = [_basis(x, head, side, centred) for side in sides for x in layers for head in _distinct(x, side)]
    ranks = np.array([basis.shape[1] for basis in bases])
    return padded_stack([basis.T for basis in bases]), ranks


def _distinct(layer: Attention, side: Side) -> range:
    """Return the heads of a layer whose subspaces are distinct: one of those that share keys and values."""
    return range(0, layer.n_heads, layer.group_size if side in "KV" else 1)


def _basis(layer: Attention, head: int, side: Side, centred: bool) -> Array:
    shared = layer.group_size if side in "KV" else 1
    w: Array = getattr(layer, f"W_{side}")[head // shared]
    columns = w.T if side == "O" else w  # d dh
    return span(columns - columns.mean(axis=0) if centred else columns)
