"""CP and Tucker of arrays with missing entries, tnlib beside tensorly.

    python -m benchmarks.missing_entries

prints the error of the whole array, hidden entries included, and the seconds: medians over five arrays.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import tnlib

_CASES = ((12, 3, 0.3), (12, 3, 0.6), (20, 5, 0.7), (30, 5, 0.9))  # size of each of three legs, rank, part missing
_STARTS, _SWEEPS, _ARRAYS = 3, 500, 5
Fit = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # array, mask of what is missing, rank -> approximation


def _array(kind: str, n: int, rank: int, rng: np.random.Generator) -> np.ndarray:
    a, b, c = rng.standard_normal((3, n, rank))
    if kind == "cp":
        return np.einsum("ir,jr,kr->ijk", a, b, c)
    return np.einsum("abc,ia,jb,kc->ijk", rng.standard_normal((rank,) * 3), a, b, c)


def _tnlib_cp(x: np.ndarray, mask: np.ndarray, rank: int) -> np.ndarray:
    return tnlib.cp(np.ma.array(x, mask=mask), rank, n_starts=_STARTS).value.full()


def _tnlib_tucker(x: np.ndarray, mask: np.ndarray, rank: int) -> np.ndarray:
    return tnlib.tucker(np.ma.array(x, mask=mask), max_rank=rank, n_iter=_SWEEPS).value.full()


def _tensorly_cp(x: np.ndarray, mask: np.ndarray, rank: int) -> np.ndarray:
    """Return the best of as many starts, as measured on the known entries."""
    from tensorly.decomposition import parafac

    options: dict[str, Any] = {"mask": ~mask, "n_iter_max": _SWEEPS, "tol": 1e-9}
    starts = [{"init": "svd"}, *({"init": "random", "random_state": seed} for seed in range(1, _STARTS))]
    fits = [parafac(np.where(mask, 0, x), rank, **options, **start).to_tensor() for start in starts]
    return min(fits, key=lambda y: float(np.linalg.norm((x - y)[~mask])))


def _tensorly_tucker(x: np.ndarray, mask: np.ndarray, rank: int) -> np.ndarray:
    from tensorly.decomposition import tucker

    return tucker(np.where(mask, 0, x), [rank] * 3, mask=~mask, n_iter_max=_SWEEPS, tol=1e-9).to_tensor()


FITS: dict[str, dict[str, Fit]] = {
    "cp": {"tnlib": _tnlib_cp, "tensorly": _tensorly_cp},
    "tucker": {"tnlib": _tnlib_tucker, "tensorly": _tensorly_tucker},
}


def main() -> None:
    """Print a row per format, size and noise; the libraries take turns on every array."""
    print("| format | n^3, rank | missing | noise | tnlib | tensorly |\n|---|---|---|---|---|---|")
    for kind, fits in FITS.items():
        for n, rank, missing in _CASES:
            for noise in (0.0, 0.01):
                rows: dict[str, list[tuple[float, float]]] = {name: [] for name in fits}
                for seed in range(_ARRAYS):
                    rng = np.random.default_rng(seed)
                    exact = _array(kind, n, rank, rng)
                    x = exact + noise * np.linalg.norm(exact) / n**1.5 * rng.standard_normal(exact.shape)
                    mask = rng.random(x.shape) < missing
                    for name, fit in fits.items():
                        start = time.perf_counter()
                        error = np.linalg.norm(exact - fit(x, mask, rank)) / np.linalg.norm(exact)
                        rows[name].append((float(error), time.perf_counter() - start))
                medians = [np.median(row, axis=0) for row in rows.values()]
                cells = " | ".join(f"{error:.0e}, {seconds:.2g} s" for error, seconds in medians)
                print(f"| {kind} | {n}^3, {rank} | {100 * missing:.0f} % | {100 * noise:.0f} % | {cells} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
