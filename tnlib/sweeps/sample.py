"""Random indices: from a train, from products, and uniform ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array

Rng = np.random.Generator


def draw(cores: Sequence[Array], count: int, rng: Rng) -> Array:
    """Return `count` indices (count, d), drawn independently with the probability |t|^2 / norm(t)^2.

    `cores` are left-isometric but the last, so that what is left of a leg sums to one: from the right, the weight of
    a leg's value given those behind it is a norm. Ferris and Vidal, "Perfect sampling with unitary tensor networks",
    Phys. Rev. B 85 (2012). The train must not be zero.
    """
    indices = np.empty((count, len(cores)), np.intp)
    behind = np.ones((count, 1), cores[-1].dtype)
    for k in range(len(cores) - 1, -1, -1):
        rows = np.tensordot(behind, cores[k], ([1], [2]))  # m l n [r]
        weights = np.cumsum(np.square(np.abs(rows)).sum(axis=1), axis=1)  # m n
        chosen = (weights <= (rng.random(count) * weights[:, -1])[:, None]).sum(axis=1)
        indices[:, k] = np.minimum(chosen, cores[k].shape[1] - 1)
        behind = rows[np.arange(count), :, indices[:, k]]  # m l
        behind = behind / np.linalg.norm(behind, axis=1, keepdims=True)
    return indices


def spread_out(shape: Sequence[int], count: int, rng: Rng) -> Array:
    """Return `count` uniform indices (count, d) of which every leg takes all its values equally often, or nearly so."""
    columns = [rng.permuted(np.resize(rng.permutation(n), count)) for n in shape]
    return np.stack(columns, axis=1)


def draw_products(profiles: Sequence[Array], count: int, rng: Rng) -> Array:
    """Return `count` indices (count, d) from the mean of s product distributions, `profiles[k]` (s, n[k]) of leg k."""
    which = rng.integers(0, len(profiles[0]), count)
    columns = []
    for profile in profiles:
        sums = np.cumsum(profile, axis=1)[which]  # m n
        chosen = (sums <= (rng.random(count) * sums[:, -1])[:, None]).sum(axis=1)
        columns.append(np.minimum(chosen, profile.shape[1] - 1))
    return np.stack(columns, axis=1)


def log_density_of_products(profiles: Sequence[Array], points: Array) -> Array:
    """Return the logarithm (m,) of the density of `draw_products` at `points` (m, d), relative to the uniform one."""
    logs = np.zeros((len(profiles[0]), len(points)))
    for profile, leg in zip(profiles, points.T, strict=True):
        p = profile * (profile.shape[1] / profile.sum(axis=1, keepdims=True))
        with np.errstate(divide="ignore"):
            logs += np.log(p)[:, leg]  # s m
    return np.asarray(np.logaddexp.reduce(logs, axis=0) - math.log(len(logs)))


def draw_beside(heads: Sequence[Array], tails: Sequence[Array], shape: Sequence[int], count: int, rng: Rng) -> Array:
    """Return `count` indices (count, d), half of them with their first legs, half with their last legs as chosen ones.

    `heads[k]` (r, k) and `tails[k]` (s, d - k) are chosen at bond k = 1 ... d-1, all bonds are equally likely, and the
    other legs uniform. So there are indices in neighbourhoods of all sizes of what was chosen.
    """
    points = np.stack([rng.integers(0, n, count) for n in shape], axis=1)
    for point, k, left in zip(
        points, rng.integers(1, len(shape), count), rng.permuted(np.arange(count) % 2), strict=True
    ):
        if left:
            point[:k] = heads[k][rng.integers(len(heads[k]))]
        else:
            point[k:] = tails[k][rng.integers(len(tails[k]))]
    return points


def log_density_beside(heads: Sequence[Array], tails: Sequence[Array], shape: Sequence[int], points: Array) -> Array:
    """Return the logarithm (m,) of the density of `draw_beside` at `points` (m, d), relative to the uniform one."""
    marks = np.random.default_rng(0).integers(
        1, 2**63, len(shape), dtype=np.uint64
    )  # of parts of indices, by their sums
    sizes = np.concatenate([[0.0], np.cumsum(np.log(shape))])
    marked = points.astype(np.uint64) * marks
    first, last = np.cumsum(marked, axis=1), np.cumsum(marked[:, ::-1], axis=1)[:, ::-1]
    logs = []
    for k in range(1, len(shape)):
        head = np.isin(first[:, k - 1], (heads[k].astype(np.uint64) * marks[:k]).sum(axis=1))
        tail = np.isin(last[:, k], (tails[k].astype(np.uint64) * marks[k:]).sum(axis=1))
        logs.append(np.where(head, sizes[k] - math.log(len(heads[k])), -np.inf))
        logs.append(np.where(tail, sizes[-1] - sizes[k] - math.log(len(tails[k])), -np.inf))
    return np.asarray(np.logaddexp.reduce(logs, axis=0) - math.log(len(logs)))
