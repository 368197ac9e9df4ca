"""The inputs: the cases, the same at every run, each with the error that counts as having solved it.

Trains and CP tensors are random, divided by their norm, plus Gaussian noise: the smallest error possible is known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.truth import best_gaussian, block_sum, compositions, core_product, inner_product, singular_values

SCALES = ("full", "small")
WITHIN = 1.001  # an iteration has converged where it is within 0.1 % of the best error
SEED = 987_654_321  # of all inputs; a peer that starts from seed 0 must not draw the factors it looks for


@dataclass(frozen=True)
class Case:
    """One input and what is asked of it."""

    name: str
    about: str
    layout: str  # of the results, see truth.py
    shape: tuple[int, ...]
    rank: int
    limit: float  # the largest true error that counts as solved
    make: Callable[[Case], Any]
    rtol: float | None = None  # what is asked for, where a tolerance and not a rank is

    @property
    def n_entries(self) -> int:
        return math.prod(self.shape)


def cases(scale: str) -> dict[str, Case]:
    """Return all cases at a scale: "full" is what is published, "small" finishes in seconds."""
    small = scale == "small"
    trains = {
        "tt24": ((2,) * (14 if small else 24), 8 if small else 16),
        "tt32": (((8,) if small else (32,)) * 5, 6 if small else 20),
        "tt20": (((6,) if small else (20,)) * 5, 4 if small else 10),
    }
    found = [
        Case(
            name,
            f"{_times(shape)} float64, a train of rank {rank} plus noise of norm 1e-4; rtol 1e-3",
            "train",
            shape,
            rank,
            limit=1e-3,
            make=lambda case: noisy_train(case.shape, case.rank),
            rtol=1e-3,
        )
        for name, (shape, rank) in trains.items()
    ]
    found += [_tucker4(*((12, 4) if small else (64, 16))), *_cubes(*((30, 5) if small else (200, 20)))]
    found += [_matrix(*((200, 25) if small else (2048, 256))), _round(*((12, 6, 12) if small else (60, 32, 64)))]
    found += [_inner(*((12, 4, 8) if small else (60, 16, 32))), _add(*((12, 4, 8) if small else (60, 16, 32)))]
    found += [_apply(*((12, 8) if small else (60, 32)))]
    found += [_cross(6, 4) if small else _cross(20, 5), _sum(*((5, 8, 3, 3) if small else (20, 30, 4, 16)))]
    found += [_heads(*((64, 4, 2, 16) if small else (4096, 32, 8, 128)))]
    found += [_composition(*((3, 2, 24, 4) if small else (12, 12, 768, 64)))]
    return {case.name: case for case in found}


@dataclass(frozen=True)
class Pair:
    """Two chains of cores, and what is to come out of them: cores, or a number as an array (1,)."""

    a: list[np.ndarray]
    b: list[np.ndarray]
    answer: Callable[[list[np.ndarray], list[np.ndarray]], Any]


@dataclass(frozen=True)
class Many:
    """Chains of cores, and what is to come out of all of them."""

    a: list[list[np.ndarray]]
    b: None
    answer: Callable[[list[list[np.ndarray]], None], list[np.ndarray]]


def noisy_train(shape: Sequence[int], rank: int, *, noise: float = 1e-4, seed: int = SEED) -> np.ndarray:
    """A train of norm 1 plus noise; no more memory than the result takes, and its two halves."""
    half = len(shape) // 2
    generator = np.random.default_rng(seed)
    left = _half(generator, shape[:half], rank)  # (n ...) r
    right = _half(generator, shape[half:][::-1], rank)  # (... n) r, in reverse order of legs
    d = len(shape) - half
    right = right.reshape(*shape[half:][::-1], -1).transpose(*range(d)[::-1], d).reshape(-1, right.shape[1])
    bond = min(left.shape[1], right.shape[1])
    x = left[:, :bond] @ right[:, :bond].T  # (n ...) [r] (n ...)
    x /= np.linalg.norm(x)
    add_noise(x, noise, generator)
    return x.reshape(shape)


def _half(generator: np.random.Generator, shape: Sequence[int], rank: int) -> np.ndarray:
    """The first cores of a random train, multiplied out: (n[0] n[1] ..., r)."""
    x = np.ones((1, 1))
    for n in shape:
        r = len(x.T)
        core = generator.standard_normal((r, n, min(rank, len(x) * n))) / math.sqrt(n * r)  # keeps the norm near 1
        x = np.tensordot(x, core, 1).reshape(-1, core.shape[2])  # (...) [r] n r'
    return x


def add_noise(x: np.ndarray, norm: float, generator: np.random.Generator) -> None:
    """Add Gaussian noise of that norm in place, a piece at a time."""
    flat = x.reshape(-1)
    for start in range(0, flat.size, 1 << 20):
        piece = flat[start : start + (1 << 20)]
        piece += norm / math.sqrt(flat.size) * generator.standard_normal(piece.size, piece.dtype)


def _tucker4(n: int, rank: int) -> Case:
    return Case(
        "tucker4",
        f"{_times((n,) * 4)} float64, Gaussian; ranks {rank}",
        "tucker",
        (n,) * 4,
        rank,
        limit=math.sqrt(1 - (rank / n) ** 4),  # what a random subspace leaves
        make=lambda case: np.random.default_rng(SEED).standard_normal(case.shape),
    )


def _cubes(n: int, rank: int) -> list[Case]:
    """The same tensor twice: its Tucker ranks, and its CP rank."""
    about = f"{_times((n,) * 3)} float64, CP rank {rank} plus noise of norm 1e-2; "
    free = {"tucker": 3 * (n - rank) * rank + rank**3, "cp": rank * (3 * n - 2)}
    goal = {layout: WITHIN * best_gaussian(1e-2, n**3, count) for layout, count in free.items()}

    def make(case: Case) -> np.ndarray:
        generator = np.random.default_rng(SEED)
        a, b, c = (generator.standard_normal((size, case.rank)) for size in case.shape)
        x = np.einsum("ir,jr,kr->ijk", a, b, c, optimize=True)  # i j k [r]
        x /= np.linalg.norm(x)
        add_noise(x, 1e-2, generator)
        return x

    return [
        Case("tucker3", f"{about}ranks {rank}", "tucker", (n,) * 3, rank, goal["tucker"], make),
        Case("cp3", f"{about}CP rank {rank}, within 0.1 % of the best error", "cp", (n,) * 3, rank, goal["cp"], make),
    ]


def _matrix(n: int, rank: int) -> Case:
    s = 1 / np.arange(1.0, n + 1)

    def make(case: Case) -> np.ndarray:
        generator = np.random.default_rng(SEED)
        u, v = (np.linalg.qr(generator.standard_normal((n, n)))[0] for _ in range(2))
        return ((u * s) @ v.T).astype(np.float32)

    best = float(np.linalg.norm(s[rank:]) / np.linalg.norm(s))
    about = f"{n} x {n} float32, singular values 1/k; rank {rank}, within 0.1 % of the optimal error {best:.4g}"
    return Case("svd", about, "svd", (n, n), rank, WITHIN * best, make)


def _round(d: int, rank: int, bond: int) -> Case:
    return Case(
        "round",
        f"{d} cores ({bond}, {rank}, {bond}) float64 whose true rank is {rank}; rtol 1e-6",
        "train",
        (rank,) * d,
        rank,
        limit=1e-6,
        make=lambda case: padded_train(case.shape, case.rank, bond),
        rtol=1e-6,
    )


def random_cores(shape: Sequence[int], rank: int, generator: np.random.Generator) -> list[np.ndarray]:
    d = len(shape)
    sizes = [1, *[rank] * (d - 1), 1]
    cores = [generator.standard_normal((sizes[k], shape[k], sizes[k + 1])) for k in range(d)]
    return [core / math.sqrt(core.shape[0] * core.shape[1]) for core in cores]


def padded_train(shape: Sequence[int], rank: int, bond: int, *, seed: int = SEED) -> list[np.ndarray]:
    """Cores of a random train of norm near 1, each bond blown up by a wide matrix and its inverse from the right."""
    generator = np.random.default_rng(seed)
    cores = random_cores(shape, rank, generator)
    for k in range(len(cores) - 1):
        wide = generator.standard_normal((rank, bond)) / math.sqrt(bond)
        cores[k] = np.tensordot(cores[k], wide, 1)  # r n [r'] bond
        cores[k + 1] = np.tensordot(np.linalg.pinv(wide), cores[k + 1], 1)  # bond [r'] n r
    return cores


def _cross(n: int, d: int) -> Case:
    return Case(
        "cross",
        f"a function of {d} indices with {n} values each, which looks up 1 / (1 + i + j + ...) in an array; rtol 1e-6",
        "train",
        (n,) * d,
        rank=16,
        limit=1e-6,
        make=lambda case: 1 / (1.0 + sum(np.ogrid[tuple(slice(n) for n in case.shape)])),
        rtol=1e-6,
    )


def _sum(count: int, d: int, n: int, rank: int) -> Case:
    def make(case: Case) -> Many:
        generator = np.random.default_rng(SEED)
        base = random_cores(case.shape, case.rank, generator)
        terms = [[core + 1e-6 * generator.standard_normal(core.shape) for core in base] for _ in range(count)]
        return Many(terms, None, lambda a, _: functools.reduce(block_sum, a))

    about = f"the sum of {count} trains of {d} cores ({rank}, {n}, {rank}) float64 that nearly agree; rtol 1e-3"
    return Case("sum", about, "train", (n,) * d, rank, limit=1e-3, make=make, rtol=1e-3)


def _inner(d: int, n: int, rank: int) -> Case:
    def make(case: Case) -> Pair:
        generator = np.random.default_rng(SEED)
        a, b = (random_cores(case.shape, rank, generator) for _ in range(2))
        return Pair(a, [one + 0.05 * two for one, two in zip(a, b, strict=True)], inner_product)

    about = f"the inner product of two trains of {d} cores ({rank}, {n}, {rank}) float64 that nearly agree"
    return Case("inner", about, "number", (n,) * d, rank, limit=1e-10, make=make)


def _add(d: int, n: int, rank: int) -> Case:
    """Bonds twice the true rank come together to four times that, and fall to twice."""

    def make(case: Case) -> Pair:
        a, b = (padded_train(case.shape, rank // 2, rank, seed=seed) for seed in (SEED, SEED + 1))
        return Pair(a, b, block_sum)

    about = (
        f"the sum of two trains of {d} cores ({rank}, {n}, {rank}) float64 whose true rank is {rank // 2}, rounded; "
        "rtol 1e-6"
    )
    return Case("add", about, "train", (n,) * d, rank, limit=1e-6, make=make, rtol=1e-6)


def _apply(d: int, rank: int) -> Case:
    n, bond = 2, 4  # of the operator, whose true rank is half of that

    def make(case: Case) -> Pair:
        cores = padded_train((n * n,) * d, bond // 2, bond, seed=SEED)
        operator = [core.reshape(len(core), n, n, -1) for core in cores]
        return Pair(operator, padded_train(case.shape, rank // 2, rank, seed=SEED + 1), core_product)

    about = (
        f"an operator of {d} cores ({bond}, {n}, {n}, {bond}) applied to a train of {d} cores ({rank}, {n}, {rank}) "
        "float64, whose true ranks are half of these; rtol 1e-6"
    )
    return Case("apply", about, "train", (n,) * d, rank, limit=1e-6, make=make, rtol=1e-6)


def _heads(d: int, heads: int, kv_heads: int, d_head: int) -> Case:
    """A layer of made-up weights, rounded as bfloat16 rounds."""

    def make(case: Case) -> Pair:
        generator = np.random.default_rng(SEED)
        sizes = [(heads, d, d_head), (kv_heads, d, d_head), (kv_heads, d, d_head), (heads, d_head, d)]
        drawn = [generator.standard_normal(size, np.float32) / np.float32(math.sqrt(d)) for size in sizes]
        weights = [(w.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for w in drawn]
        return Pair(weights, [], singular_values)

    about = (
        f"the singular values of QK and OV of {heads} heads of {d_head} on {kv_heads} key and value heads, "
        f"d_model {d}, float32"
    )
    return Case("heads", about, "number", (heads, d, d_head), d_head, limit=1e-4, make=make)


def _composition(layers: int, heads: int, d: int, d_head: int) -> Case:
    """Random weights of all layers: W_Q, W_K, W_V (layer, head, d, d_head) and W_O (layer, head, d_head, d)."""

    def make(case: Case) -> Pair:
        generator = np.random.default_rng(SEED)
        drawn = [generator.standard_normal((layers, heads, d, d_head), np.float32) for _ in range(4)]
        return Pair([*drawn[:3], drawn[3].transpose(0, 1, 3, 2)], [], compositions)

    about = f"K-composition of all pairs of {layers} x {heads} heads of {d_head}, d_model {d}, float32, without biases"
    return Case("composition", about, "number", (layers, heads, d, d_head), d_head, limit=1e-4, make=make)


def _times(shape: Sequence[int]) -> str:
    if len(set(shape)) == 1 and len(shape) > 4:
        return f"{shape[0]}^{len(shape)}"
    return " x ".join(map(str, shape))
