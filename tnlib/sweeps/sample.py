"""Random indices: from a train, from products, and uniform ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array


def draw(cores: Sequence[Array], count: int, rng: np.random.Generator) -> Array:
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


def spread_out(shape: Sequence[int], count: int, rng: np.random.Generator) -> Array:
    """Return `count` uniform indices (count, d) of which every leg takes all its values equally often, or nearly so."""
    columns = [rng.permuted(np.resize(rng.permutation(n), count)) for n in shape]
    return np.stack(columns, axis=1)


def draw_products(profiles: Sequence[Array], count: int, rng: np.random.Generator) -> Array:
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
