"""Random indices of a tensor: drawn from a train, from product distributions, and uniformly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.formats.train.perfect_sampling import invert_distribution

Rng = np.random.Generator


def sample_train(cores: Sequence[Array], count: int, rng: Rng) -> Array:
    """Return `count` indices (count, d), drawn independently with the probability |t|^2 / norm(t)^2, t not zero.

    `cores` are left-isometric but the last, so that the legs are drawn from the last one to the first.
    """
    reverse = [core.transpose(2, 1, 0) for core in reversed(cores)]  # r n l
    return invert_distribution(reverse, rng.random((len(cores), count)).T)[:, ::-1]


def sample_uniform(shape: Sequence[int], count: int, rng: Rng) -> Array:
    """Return `count` uniform indices (count, d) in which every leg takes all its values nearly equally often."""
    columns = [rng.permuted(np.resize(rng.permutation(n), count)) for n in shape]
    return np.stack(columns, axis=1)


def sample_products(profiles: Sequence[Array], count: int, rng: Rng) -> Array:
    """Return `count` indices (count, d) from the mean of s product distributions, `profiles[k]` (s, n[k]) of leg k."""
    component = rng.integers(0, len(profiles[0]), count)
    return np.stack([_draw(profile[component], rng) for profile in profiles], axis=1)


def _draw(weights: Array, rng: Rng) -> Array:
    """Return one index (m,) for each row of `weights` (m, n), drawn with a probability proportional to them."""
    sums = np.cumsum(weights, axis=1)
    drawn = (sums <= (rng.random(len(sums)) * sums[:, -1])[:, None]).sum(axis=1)
    return np.asarray(np.minimum(drawn, weights.shape[1] - 1))


def log_density_of_products(profiles: Sequence[Array], points: Array) -> Array:
    """Return the logarithm (m,) of the density of `sample_products` at `points` (m, d), relative to the uniform one."""
    logs = np.zeros((len(profiles[0]), len(points)))
    for profile, leg in zip(profiles, points.T, strict=True):
        p = profile * (profile.shape[1] / profile.sum(axis=1, keepdims=True))
        with np.errstate(divide="ignore"):
            logs += np.log(p)[:, leg]  # s m
    return np.asarray(np.logaddexp.reduce(logs, axis=0) - math.log(len(logs)))


def sample_beside(heads: Sequence[Array], tails: Sequence[Array], shape: Sequence[int], count: int, rng: Rng) -> Array:
    """Return `count` indices (count, d), half with the first legs of a head, half with the last legs of a tail.

    `heads[k]` (r, k) and `tails[k]` (s, d - k) are those of bond k = 1 ... d-1, all bonds are equally likely, and the
    other legs uniform. The indices fill neighbourhoods of all sizes around the chosen ones.
    """
    points = np.stack([rng.integers(0, n, count) for n in shape], axis=1)
    bonds, heads_first = rng.integers(1, len(shape), count), rng.permuted(np.arange(count) % 2)
    for point, k, use_head in zip(points, bonds, heads_first, strict=True):
        if use_head:
            point[:k] = heads[k][rng.integers(len(heads[k]))]
        else:
            point[k:] = tails[k][rng.integers(len(tails[k]))]
    return points


def log_density_beside(heads: Sequence[Array], tails: Sequence[Array], shape: Sequence[int], points: Array) -> Array:
    """Return the logarithm (m,) of the density of `sample_beside` at `points` (m, d), relative to the uniform one."""
    hashes = np.random.default_rng(0).integers(1, 2**63, len(shape), dtype=np.uint64)  # of parts of indices, as sums
    sizes = np.concatenate([[0.0], np.cumsum(np.log(shape))])
    hashed = points.astype(np.uint64) * hashes
    first, last = np.cumsum(hashed, axis=1), np.cumsum(hashed[:, ::-1], axis=1)[:, ::-1]
    logs = []
    for k in range(1, len(shape)):
        head = np.isin(first[:, k - 1], (heads[k].astype(np.uint64) * hashes[:k]).sum(axis=1), kind="sort")
        tail = np.isin(last[:, k], (tails[k].astype(np.uint64) * hashes[k:]).sum(axis=1), kind="sort")
        logs.append(np.where(head, sizes[k] - math.log(len(heads[k])), -np.inf))
        logs.append(np.where(tail, sizes[-1] - sizes[k] - math.log(len(tails[k])), -np.inf))
    return np.asarray(np.logaddexp.reduce(logs, axis=0) - math.log(len(logs)))
