"""The registry: for each case, who solves it and how it is called.

Every entry is at the fastest setting found that meets what the case asks for; where none does, its error says so.
An entry gets the data in its own class, made beforehand, and its result is taken apart afterwards: neither is timed.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.attention import COMPOSITION, HEADS
from benchmarks.calculus import ADD, APPLY, INNER, ROUND
from benchmarks.cases import Case
from benchmarks.crosses import CROSS, SUM
from benchmarks.entry import SPLIT, Entry, per_bond, quimb_cores, resolve, tnlib_cores, to_torch, unchanged


def _pyttb(x: np.ndarray, _: Case) -> Any:
    return importlib.import_module("pyttb").tensor(x)


# ---- dense array -> train


def _quimb_dense(method: str) -> Callable[[Any, Any, Case], Any]:
    def run(states: Any, x: np.ndarray, case: Case) -> Any:
        cutoff = per_bond(case) ** 2  # of the sum of squares, relative
        return states.from_dense(x, dims=x.shape, method=method, cutoff=cutoff, cutoff_mode="rsum2")

    return run


def _tenpy_state(x: np.ndarray, _: Case) -> Any:
    module = importlib.import_module("tenpy.linalg.np_conserved")
    return module.Array.from_ndarray_trivial(x, labels=[f"p{k}" for k in range(x.ndim)])


def _tenpy_dense(states: Any, psi: Any, case: Case) -> Any:
    site, charge = (importlib.import_module(f"tenpy.{name}") for name in ("networks.site", "linalg.charges"))
    sites = [site.Site(charge.LegCharge.from_trivial(n)) for n in case.shape]
    # Each value below the cutoff goes, however many they are: so many of them at most.
    cutoff = per_bond(case) / math.sqrt(case.rank * max(case.shape))
    return states.from_full(sites, psi, cutoff=cutoff, normalize=False, unit_cell_width=len(sites))


def _tenpy_cores(state: Any) -> list[np.ndarray]:
    tensors = [state.get_B(0, form="Th"), *(state.get_B(k, form="B") for k in range(1, state.L))]
    cores = [tensor.transpose(["vL", "p", "vR"]).to_ndarray() for tensor in tensors]
    return [state.norm * cores[0], *cores[1:]]


def _true_ranks(case: Case) -> list[int]:
    sizes = [math.prod(case.shape[:k]) for k in range(len(case.shape) + 1)]
    return [min(case.rank, size, sizes[-1] // size) for size in sizes]


TRAIN = (
    Entry(
        "tnlib", "tnlib:tt_svd", lambda tt_svd, x, case: tt_svd(x, rtol=case.rtol), tnlib_cores, "tt_svd(x, rtol=rtol)"
    ),
    Entry(
        "quimb, Gram mode",
        "quimb.tensor:MatrixProductState",
        _quimb_dense("svd:eig"),
        quimb_cores,
        f"MatrixProductState.from_dense(x, method='svd:eig', cutoff_mode='rsum2', cutoff=({SPLIT})**2)",
    ),
    Entry(
        "quimb",
        "quimb.tensor:MatrixProductState",
        _quimb_dense("svd"),
        quimb_cores,
        f"MatrixProductState.from_dense(x, method='svd', cutoff_mode='rsum2', cutoff=({SPLIT})**2)",
        exact=True,
    ),
    Entry(
        "torchTT",
        "torchtt:TT",
        lambda train, x, case: train(x, eps=case.rtol),
        lambda train: train.cores,
        "TT(x, eps=rtol)",
        prepare=to_torch,
        exact=True,
    ),
    Entry(
        "tensorly",
        "tensorly.decomposition:tensor_train",
        lambda tensor_train, x, case: tensor_train(x, rank=_true_ranks(case)),
        lambda train: train.factors,
        "tensor_train(x, rank=ranks); the true ranks are passed, because it has no tolerance",
        exact=True,
    ),
    Entry(
        "teneva",
        "teneva:svd",
        lambda svd, x, case: svd(x, e=per_bond(case), r=case.rank),  # e is absolute; the data have norm 1
        unchanged,
        f"svd(x, e={SPLIT}, r=rank); the true rank is passed, because otherwise it keeps the noise of long trains",
        exact=True,
    ),
    Entry(
        "TeNPy",
        "tenpy.networks.mps:MPS",
        _tenpy_dense,
        _tenpy_cores,
        f"MPS.from_full(sites, x, cutoff={SPLIT} / sqrt(rows)); the cutoff is a threshold for every singular value",
        prepare=_tenpy_state,
        exact=True,
    ),
)

# ---- dense array -> Tucker


def _pair(result: Any) -> list[Any]:
    core, factors = result
    return [core, *factors]


def _pyttb_tucker(tucker_als: Any, x: Any, case: Case) -> Any:
    np.random.seed(0)  # noqa: NPY002 - the only generator it takes
    return tucker_als(x, case.rank, printitn=0)[0]


TUCKER = (
    Entry(
        "tnlib",
        "tnlib:tucker",
        lambda tucker, x, case: tucker(x, ranks=case.rank),
        lambda fit: [fit.value.core, *fit.value.factors],
        "tucker(x, ranks=ranks)",
    ),
    Entry(
        "pyttb hosvd",
        "pyttb:hosvd",
        lambda hosvd, x, case: hosvd(x, tol=0, ranks=[case.rank] * x.ndims, verbosity=0),
        lambda t: [t.core.data, *t.factor_matrices],
        "hosvd(x, ranks=ranks); sequentially truncated, by Gram matrices",
        prepare=_pyttb,
    ),
    Entry(
        "pyttb tucker_als",
        "pyttb:tucker_als",
        _pyttb_tucker,
        lambda t: [t.core.data, *t.factor_matrices],
        "tucker_als(x, ranks)",
        prepare=_pyttb,
    ),
    Entry(
        "tensorly",
        "tensorly.decomposition:tucker",
        lambda tucker, x, case: tucker(x, rank=[case.rank] * x.ndim),
        _pair,
        "tucker(x, rank=ranks)",
        exact=True,
    ),
    Entry(
        "tensorly, one sweep",
        "tensorly.decomposition:tucker",
        lambda tucker, x, case: tucker(x, rank=[case.rank] * x.ndim, n_iter_max=1),
        _pair,
        "tucker(x, rank=ranks, n_iter_max=1)",
        exact=True,
    ),
)

# ---- dense array -> CP

# Most starts end in a local minimum. A peer's row is timed from its first random start that does not; the row
# "all starts" is what it costs to get there without knowing the seed.
STARTS = 50

Start = Callable[[Any, Any, Case, int], tuple[Any, float]]  # function, data, case, seed -> result, its error


def _until_converged(start: Start, function: Any, x: Any, case: Case) -> tuple[Any, int]:
    """Start from one seed after the other until the error is reached; the result and the last seed."""
    for seed in range(STARTS):
        found, error = start(function, x, case, seed)
        if error <= case.limit:
            break
    return found, seed


def _pyttb_start(cp_als: Any, x: Any, case: Case, seed: int) -> tuple[Any, float]:
    np.random.seed(seed)  # noqa: NPY002 - the only generator it takes
    found, _, report = cp_als(x, case.rank, stoptol=1e-5, init="random", printitn=0)
    return found, 1 - float(report["fit"])


def _tensorly_start(parafac: Any, x: np.ndarray, case: Case, seed: int) -> tuple[Any, float]:
    options = {"init": "random", "random_state": seed, "n_iter_max": 1000, "return_errors": True}
    found, errors = parafac(x, case.rank, tol=1e-5, **options)
    return found, float(errors[-1])


@functools.cache
def _pyttb_seed(case: Case) -> int:
    return _until_converged(_pyttb_start, resolve("pyttb:cp_als"), _pyttb(case.make(case), case), case)[1]


@functools.cache
def _tensorly_seed(case: Case) -> int:
    return _until_converged(_tensorly_start, resolve("tensorly.decomposition:parafac"), case.make(case), case)[1]


def _weighted(t: Any) -> list[Any]:
    return [t.weights, *t.factor_matrices]


CP = (
    Entry(
        "tnlib",
        "tnlib:cp",
        lambda cp, x, case: cp(x, case.rank, rtol=case.limit, n_starts=STARTS),
        lambda fit: [fit.value.weights, *fit.value.factors],
        "cp(x, rank, rtol=limit, n_starts=50); the limit is the largest error that counts as solved",
    ),
    Entry(
        "pyttb",
        "pyttb:cp_als",
        lambda cp_als, data, case: _pyttb_start(cp_als, data[0], case, data[1])[0],
        _weighted,
        "cp_als(x, rank, stoptol=1e-5); time of the first seed that converges",
        prepare=lambda x, case: (_pyttb(x, case), _pyttb_seed(case)),
    ),
    Entry(
        "pyttb, all starts",
        "pyttb:cp_als",
        lambda cp_als, x, case: _until_converged(_pyttb_start, cp_als, x, case)[0],
        _weighted,
        "cp_als(x, rank, stoptol=1e-5); time of all seeds from 0 to the first that converges",
        prepare=_pyttb,
    ),
    Entry(
        "pyttb, singular start",
        "pyttb:cp_als",
        lambda cp_als, x, case: cp_als(x, case.rank, stoptol=1e-5, init="nvecs", printitn=0)[0],
        _weighted,
        "cp_als(x, rank, stoptol=1e-5, init='nvecs')",
        prepare=_pyttb,
    ),
    Entry(
        "tensorly",
        "tensorly.decomposition:parafac",
        lambda parafac, data, case: _tensorly_start(parafac, data[0], case, data[1])[0],
        _pair,
        "parafac(x, rank, init='random', tol=1e-5); time of the first seed that converges",
        prepare=lambda x, case: (x, _tensorly_seed(case)),
    ),
    Entry(
        "tensorly, all starts",
        "tensorly.decomposition:parafac",
        lambda parafac, x, case: _until_converged(_tensorly_start, parafac, x, case)[0],
        _pair,
        "parafac(x, rank, init='random', tol=1e-5); time of all seeds from 0 to the first that converges",
    ),
    Entry(
        "tensorly, singular start",
        "tensorly.decomposition:parafac",
        lambda parafac, x, case: parafac(x, case.rank, init="svd", tol=1e-5, n_iter_max=1000),
        _pair,
        "parafac(x, rank, init='svd', tol=1e-5)",
    ),
)

# ---- matrix -> truncated SVD


def _cut(rank: int, u: Any, s: Any, vh: Any) -> list[Any]:
    return [u[:, :rank], s[:rank], vh[:rank]]


def _torch_lowrank(extra: int, n_iter: int) -> Callable[[Any, Any, Case], Any]:
    def run(svd_lowrank: Any, a: Any, case: Case) -> Any:
        u, s, v = svd_lowrank(a, q=case.rank + extra, niter=n_iter)
        return _cut(case.rank, u, s, v.T)

    return run


SVD = (
    Entry(
        "tnlib",
        "tnlib:svd",
        lambda svd, a, case: svd(a, max_rank=case.rank),
        lambda fit: [fit.value.u, fit.value.s, fit.value.vh],
        "svd(a, max_rank=rank)",
    ),
    Entry(
        "scipy",
        "scipy.linalg:svd",
        lambda svd, a, case: _cut(case.rank, *svd(a, full_matrices=False)),
        unchanged,
        "linalg.svd(a, full_matrices=False); the result is truncated",
        exact=True,
    ),
    Entry(
        "torch",
        "torch.linalg:svd",
        lambda svd, a, case: _cut(case.rank, *svd(a, full_matrices=False)),
        unchanged,
        "linalg.svd(a, full_matrices=False); the result is truncated",
        prepare=to_torch,
        exact=True,
    ),
    Entry(
        "torch lowrank",
        "torch:svd_lowrank",
        _torch_lowrank(0, 2),
        unchanged,
        "svd_lowrank(a, q=rank); two power iterations, the default",
        prepare=to_torch,
    ),
    Entry(
        "torch lowrank, refined",
        "torch:svd_lowrank",
        _torch_lowrank(32, 3),
        unchanged,
        "svd_lowrank(a, q=rank + 32, niter=3); the result is truncated",
        prepare=to_torch,
    ),
    Entry(
        "sklearn randomized",
        "sklearn.utils.extmath:randomized_svd",
        lambda svd, a, case: svd(a, case.rank, random_state=0),
        unchanged,
        "randomized_svd(a, rank); default options",
    ),
    Entry(
        "sklearn randomized, refined",
        "sklearn.utils.extmath:randomized_svd",
        lambda svd, a, case: svd(a, case.rank, n_oversamples=32, n_iter=4, random_state=0),
        unchanged,
        "randomized_svd(a, rank, n_oversamples=32, n_iter=4)",
    ),
)

REGISTRY: dict[str, tuple[Entry, ...]] = {
    "tt24": TRAIN,
    "tt32": TRAIN,
    "tt20": TRAIN,
    "tucker4": TUCKER,
    "tucker3": TUCKER,
    "cp3": CP,
    "svd": SVD,
    "round": ROUND,
    "inner": INNER,
    "add": ADD,
    "apply": APPLY,
    "cross": CROSS,
    "sum": SUM,
    "heads": HEADS,
    "composition": COMPOSITION,
}
