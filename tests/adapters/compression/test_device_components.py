"""Components of large weights, in single precision, beside those in double precision."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tnlib_adapters.compression.methods import components as components_module  # noqa: E402
from tnlib_adapters.compression.methods import device_components  # noqa: E402
from tnlib_adapters.compression.methods.components import WeightOnText, components  # noqa: E402
from tnlib_adapters.compression.methods.device_components import components_on, in_single_precision  # noqa: E402

CPU = torch.device("cpu")


def on_text(weight: np.ndarray, reads: np.ndarray, slopes: np.ndarray) -> WeightOnText:
    return WeightOnText(weight, lambda: reads, lambda: slopes)


def components_on_cpu(*given: np.ndarray):
    return dict(components_on(CPU, {"only": on_text(*given)}))["only"]


def moments_of(rng: np.random.Generator, n: int, rank: int, scale: float) -> np.ndarray:
    x = scale * rng.standard_normal((rank, n)) * 10.0 ** -np.linspace(0, 2, n)
    return (x.T @ x).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-10, 1.0, 1e10]),
    singular=st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_every_rank_loses_what_it_loses_in_double_precision(m, n, seed, scale, singular):
    """The weights of a batch, with singular moments and others, are decomposed as by themselves."""
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal((m, n)).astype(np.float32) for _ in singular]
    ranks = [[max(1, k // 2) if lower else 2 * k for lower in singular] for k in (m, n)]
    reads, slopes = ([moments_of(rng, k, rank, scale) for rank in own] for k, own in zip((m, n), ranks, strict=True))
    batch = in_single_precision(CPU, weights, reads, slopes)
    assert len(batch) == len(weights)
    for found, *own in zip(batch, weights, reads, slopes, strict=True):
        check_losses(found, *own)


def check_losses(found, weight: np.ndarray, reads: np.ndarray, slopes: np.ndarray) -> None:
    m, n = weight.shape
    exact = components(weight, reads, slopes)
    assert found.left.dtype == found.right.dtype == weight.dtype
    scales = reads / np.trace(reads), slopes / np.trace(slopes)

    def error(own, rank) -> float:
        change = (own.left[:, :rank].astype(np.float64) @ own.right[:rank] - weight).astype(np.float64)
        return float(np.sqrt(max(0.0, np.trace(scales[0] @ change @ scales[1] @ change.T))))

    whole = error(exact, 0)
    for rank in range(min(m, n) + 1):
        assert error(found, rank) <= error(exact, rank) + 1e-3 * whole
    np.testing.assert_allclose(found.losses, exact.losses, atol=1e-4)
    assert np.all(np.diff(found.losses) <= 0)


def test_nothing_read_gives_components_of_the_weight():
    weight = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    given = [weight, 2 * weight], [np.zeros((6, 6), np.float32)] * 2, [np.zeros((4, 4), np.float32), np.eye(4)]
    for found, own in zip(in_single_precision(CPU, *given), given[0], strict=True):
        np.testing.assert_allclose(found.left @ found.right, own, atol=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_large_weights_take_it_and_small_ones_do_not(monkeypatch, fails):
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((24, 16)).astype(np.float32)
    given = weight, moments_of(rng, 24, 60, 1.0), moments_of(rng, 16, 60, 1.0)
    small = components_on_cpu(*given)
    assert np.array_equal(small.left, components(*given).left)
    monkeypatch.setattr(components_module, "_LARGE_WEIGHT", 1)
    if fails:  # the solver of the device, and then the host in double precision
        solve = torch.linalg.eigh

        def eigh(a: torch.Tensor):
            if a.dtype == torch.float32:
                raise RuntimeError("linalg.eigh: the algorithm did not converge")
            return solve(a)

        monkeypatch.setattr(torch.linalg, "eigh", eigh)
    large = components_on_cpu(*given)
    assert not np.array_equal(small.left, large.left)
    np.testing.assert_allclose(large.left @ large.right, weight, atol=1e-4)
    wide = components_on_cpu(weight.astype(np.float64), *given[1:])  # keeps its precision
    np.testing.assert_allclose(wide.left @ wide.right, weight, atol=1e-12)


def test_weights_of_one_shape_are_one_batch(monkeypatch):
    """On a device: here the CPU, in the place of one."""
    monkeypatch.setattr(device_components, "_is_host", lambda device: False)
    rng, shapes, solved = np.random.default_rng(2), {"a": (6, 4), "b": (6, 4), "c": (4, 6), "d": (6, 4)}, []
    weights = {
        key: (rng.standard_normal(shape).astype(np.float32), *(moments_of(rng, k, 2 * k, 1.0) for k in shape))
        for key, shape in shapes.items()
    }
    table = rng.standard_normal((7, 4)).astype(np.float32)
    weights["table"] = table, np.arange(7.0, dtype=np.float32), weights["a"][2]
    weights["double"] = weights["a"][0].astype(np.float64), *weights["a"][1:]
    solve = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda gram: solved.append(len(gram)) or solve(gram))

    def check(batches: list[int]) -> None:
        solved.clear()
        found = dict(components_on(CPU, {key: on_text(*own) for key, own in weights.items()}))
        assert found.keys() == weights.keys()
        assert sorted(solved) == batches
        for key, own in found.items():
            if key != "table":
                check_losses(own, *weights[key])

    check([1, 3])
    monkeypatch.setattr(device_components, "_BATCH", 2 * (36 + 24 + 16))
    check([1, 1, 2])
    monkeypatch.setattr(device_components, "_BATCH", 1)
    check([1, 1, 1, 1])
