"""Everyday operations at everyday sizes: every library in turns, in one process and one thread.

    python -m benchmarks.everyday [--write] [word ...]

prints the CPU time of the operations whose names have one of the words, and its ratio to that of the fastest peer.
With --write it times all of them and writes docs/benchmarks-everyday.md.
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")  # read at imports

import functools
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tnlib
from benchmarks.calculus import quimb_operator
from benchmarks.cases import SEED, random_cores
from benchmarks.crosses import teneva_cross, torch_cross
from benchmarks.entry import quimb_state, resolve, torch_train
from benchmarks.machine import measured_on

TURNS, LEAST = 9, 2e-3  # rounds of all libraries, and CPU seconds of one
OURS = "tnlib"
GOAL = 1.2  # times the fastest peer
PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks-everyday.md"
HEAD = "| operation | tnlib, ms | fastest peer | ratio | peers, ms |\n|---|---|---|---|---|"
ABOUT = """\
Small arrays and trains, where the cost of a call is that of Python and of LAPACK's small matrices. All libraries take
turns in one process with one thread; times are medians of CPU time, and the ratio is that of tnlib to the fastest peer:
above 1, tnlib is slower. d is the number of legs, r the rank. The constructor of tnlib checks its cores and finds their
scales, an entry of tnlib is computed without overflow. By `python -m benchmarks.everyday --write`."""
Calls = Mapping[str, Callable[[], Any]]


class Train:
    """One train in the classes of all libraries."""

    def __init__(self, shape: Sequence[int], rank: int, seed: int = 0) -> None:
        self.cores = random_cores(shape, rank, np.random.default_rng(SEED + seed))

    @functools.cached_property
    def ours(self) -> tnlib.TensorTrain:
        return tnlib.TensorTrain(self.cores)

    @functools.cached_property
    def torch(self) -> Any:
        return torch_train(self.cores, None)  # type: ignore[arg-type]

    @functools.cached_property
    def quimb(self) -> Any:
        return quimb_state(self.cores, None)  # type: ignore[arg-type]

    @functools.cached_property
    def tntorch(self) -> Any:
        return resolve("tntorch:Tensor")([_tensor(core) for core in self.cores])


class Matrix(Train):
    """One operator of square cores in the classes of the libraries that have them."""

    def __init__(self, n: int, d: int, rank: int, seed: int = 0) -> None:
        super().__init__((n * n,) * d, rank, seed)
        self.cores = [core.reshape(len(core), n, n, -1) for core in self.cores]

    @functools.cached_property
    def ours(self) -> Any:
        return tnlib.TTMatrix(self.cores)

    @functools.cached_property
    def quimb(self) -> Any:
        return quimb_operator(self.cores, None)  # type: ignore[arg-type]


def _tensor(x: np.ndarray) -> Any:
    return resolve("torch:from_numpy")(np.ascontiguousarray(x))


def _teneva(name: str) -> Callable[..., Any]:
    return resolve(f"teneva:{name}")  # type: ignore[no-any-return]


# ---- arrays -> formats


def _tt_svd(x: np.ndarray, rtol: float, ranks: Sequence[int]) -> Calls:
    torchtt, t = resolve("torchtt:TT"), _tensor(x)
    cut = rtol * float(np.linalg.norm(x)) / np.sqrt(x.ndim - 1)
    quimb = resolve("quimb.tensor:MatrixProductState.from_dense")
    return {
        OURS: lambda: tnlib.tt_svd(x, rtol=rtol),
        "torchTT": lambda: torchtt(t, eps=rtol),
        "teneva": lambda: _teneva("svd")(x, rtol * float(np.linalg.norm(x))),
        "tensorly": lambda: resolve("tensorly.decomposition:tensor_train")(x, list(ranks)),
        "quimb": lambda: quimb(x.reshape(-1), x.shape, cutoff=cut**2, cutoff_mode="sum2"),
    }


def _reciprocal(n: int, d: int) -> np.ndarray:
    return 1 / (1.0 + sum(np.ogrid[(slice(n),) * d]))


def _tucker(n: int, rank: int) -> Calls:
    generator = np.random.default_rng(SEED)
    x, ranks = generator.standard_normal((n,) * 3), (rank,) * 3
    tensor = resolve("pyttb:tensor")(x)
    return {
        OURS: lambda: tnlib.tucker(x, ranks=ranks),
        "tensorly": lambda: resolve("tensorly.decomposition:tucker")(x, ranks, n_iter_max=1),
        "pyttb": lambda: resolve("pyttb:hosvd")(tensor, 1e-6, verbosity=0, ranks=list(ranks)),
    }


def _cp(n: int, rank: int) -> Calls:
    generator = np.random.default_rng(SEED)
    x = np.einsum("ir,jr,kr->ijk", *(generator.standard_normal((n, rank)) for _ in range(3)))
    x += 1e-3 * generator.standard_normal(x.shape)
    tensor = resolve("pyttb:tensor")(x)
    return {
        OURS: lambda: tnlib.cp(x, rank, rng=0),
        "tensorly": lambda: resolve("tensorly.decomposition:parafac")(x, rank, tol=1e-8, random_state=0),
        "pyttb": lambda: resolve("pyttb:cp_als")(tensor, rank, init="nvecs", stoptol=1e-8, printitn=0),
    }


def _svd(m: int, n: int, rank: int) -> Calls:
    a = np.random.default_rng(SEED).standard_normal((m, n))
    t, torch_svd = _tensor(a), resolve("torch:linalg.svd")

    def of_torch() -> Any:
        u, s, vh = torch_svd(t, full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank]

    return {
        OURS: lambda: tnlib.svd(a, max_rank=rank),
        "torch": of_torch,
        "tensorly": lambda: resolve("tensorly.tenalg.svd:svd_interface")(a, n_eigenvecs=rank, method="truncated_svd"),
    }


def _cross(n: int, d: int) -> Calls:
    x = _reciprocal(n, d)

    def f(points: Any) -> np.ndarray:
        return x[tuple(np.asarray(points).T)]

    return {
        OURS: lambda: tnlib.tt_cross(f, x.shape, rtol=1e-6, rng=0),
        "torchTT": lambda: torch_cross(resolve("torchtt.interpolate:dmrg_cross"), f, x.shape, 1e-6),
        "teneva": lambda: teneva_cross(_teneva("cross"), f, x.shape, 1e-6),
    }


# ---- one train


def _constructor(a: Train) -> Calls:
    tensors, squeezed = a.torch.cores, [a.cores[0][0], *a.cores[1:-1], a.cores[-1][..., 0]]
    return {
        OURS: lambda: tnlib.TensorTrain(a.cores),
        "torchTT": lambda: resolve("torchtt:TT")(tensors),
        "tntorch": lambda: resolve("tntorch:Tensor")(tensors),
        "quimb": lambda: resolve("quimb.tensor:MatrixProductState")(squeezed, shape="lpr"),
    }


def _round(a: Train, rank: int) -> Calls:
    def of_quimb() -> Any:
        state = a.quimb.copy()
        state.compress(max_bond=rank, cutoff=0.0)
        return state

    return {
        OURS: lambda: tnlib.round(a.ours, max_rank=rank),
        "torchTT": lambda: a.torch.round(eps=0.0, rmax=rank),
        "teneva": lambda: _teneva("truncate")(a.cores, e=0.0, r=rank, is_eigh=False),
        "quimb": of_quimb,
    }


def _entries(a: Train, count: int) -> Calls:
    points = np.random.default_rng(SEED).integers(0, a.cores[0].shape[1], (count, len(a.cores)))
    tensor = _tensor(points)
    return {
        OURS: lambda: tnlib.entries(a.ours, points),
        "teneva": lambda: _teneva("get_many")(a.cores, points),
        "torchTT": lambda: a.torch.apply_mask(tensor),
    }


def _one_entry(a: Train) -> Calls:
    index = (1,) * len(a.cores)
    at = np.array(index)
    return {
        OURS: lambda: a.ours[index],
        "teneva": lambda: _teneva("get")(a.cores, at),
        "torchTT": lambda: a.torch[index],
        "quimb": lambda: a.quimb.amplitude("1" * len(at)),
    }


def _slice(a: Train) -> Calls:
    index = (slice(None),) * (len(a.cores) - 2) + (1, slice(None))
    return {OURS: lambda: a.ours[index], "torchTT": lambda: a.torch[index]}


def _full(a: Train) -> Calls:
    return {
        OURS: a.ours.full,
        "torchTT": a.torch.full,
        "teneva": lambda: _teneva("full")(a.cores),
        "tensorly": lambda: resolve("tensorly:tt_to_tensor")(a.cores),
        "quimb": lambda: a.quimb.to_dense(),
    }


def _norm(a: Train) -> Calls:
    return {
        OURS: lambda: tnlib.TensorTrain.from_sweep(a.ours.cores, None, 0).norm(),
        "torchTT": a.torch.norm,
        "teneva": lambda: _teneva("norm")(a.cores),
        "quimb": a.quimb.norm,
    }


def _sum_legs(a: Train) -> Calls:
    legs = range(len(a.cores))
    return {
        OURS: lambda: tnlib.sum_legs(a.ours, legs),
        "teneva": lambda: _teneva("sum")(a.cores),
        "torchTT": a.torch.sum,
    }


def _canonicalize(a: Train, center: int) -> Calls:
    return {
        OURS: lambda: tnlib.canonicalize(a.ours, center),
        "torchTT": lambda: resolve("torchtt._decomposition:lr_orthogonal")(a.torch.cores, a.torch.R, False),
        "teneva": lambda: _teneva("orthogonalize")(a.cores, center),
        "quimb": lambda: a.quimb.canonicalize(center),
    }


def _entropy(a: Train, bond: int) -> Calls:
    ours, theirs = tnlib.canonicalize(a.ours, bond - 1), a.quimb.canonicalize(bond)
    return {
        OURS: lambda: tnlib.entropy(ours, bond),
        "quimb": lambda: theirs.entropy(bond, info={"cur_orthog": (bond, bond)}),
    }


def _entropies(a: Train) -> Calls:
    def of_quimb() -> Any:
        info: dict[str, Any] = {"cur_orthog": (0, 0)}
        state = start.copy()
        return [state.entropy(k, info=info) for k in range(1, len(a.cores))]

    ours, start = tnlib.canonicalize(a.ours, 0), a.quimb.canonicalize(0)
    return {OURS: lambda: tnlib.entropies(ours), "quimb": of_quimb}


def _gate(a: Train, legs: tuple[int, ...]) -> Calls:
    n = int(np.prod([a.cores[k].shape[1] for k in legs]))
    gate = np.linalg.qr(np.random.default_rng(SEED).standard_normal((n, n)))[0]
    ours, theirs = tnlib.canonicalize(a.ours, legs[0]), a.quimb.canonicalize(legs[0])
    options = {"contract": "swap+split", "cutoff": 1e-14} if len(legs) == 2 else {"contract": True}
    return {
        OURS: lambda: tnlib.apply_gate(ours, gate, legs),
        "quimb": lambda: theirs.gate(gate, legs, **options),
    }


def _sample(a: Train, count: int) -> Calls:
    return {
        OURS: lambda: tnlib.sample(a.ours, count, rng=0),
        "quimb": lambda: list(a.quimb.sample(count, seed=0)),
    }


# ---- two trains, and operators


def _pair(a: Train, b: Train, ours: Callable[..., Any], torch: Callable[..., Any], teneva: str = "") -> Calls:
    calls = {OURS: lambda: ours(a.ours, b.ours), "torchTT": lambda: torch(a.torch, b.torch)}
    return calls | ({"teneva": lambda: _teneva(teneva)(a.cores, b.cores)} if teneva else {})


def _add(a: Train, b: Train) -> Calls:
    pair = _pair(a, b, lambda x, y: x + y, lambda x, y: x + y, "add")
    return {**pair, "quimb": lambda: a.quimb.add_MPS(b.quimb)}


def _inner(a: Train, b: Train) -> Calls:
    pair = _pair(a, b, tnlib.inner, resolve("torchtt:dot"), "mul_scalar")
    return {**pair, "quimb": lambda: a.quimb.H @ b.quimb}


def _multiple(a: Train) -> Calls:
    return {
        OURS: lambda: 2.5 * a.ours,
        "torchTT": lambda: 2.5 * a.torch,
        "teneva": lambda: _teneva("mul")(2.5, a.cores),
        "quimb": lambda: a.quimb * 2.5,
    }


def _sum_of_ten(shape: Sequence[int], rank: int) -> Calls:
    terms = [Train(shape, rank, seed) for seed in range(10)]
    return {
        OURS: lambda: tnlib.round(sum(t.ours for t in terms), rtol=1e-6),
        "torchTT": lambda: functools.reduce(lambda a, b: a + b, [t.torch for t in terms]).round(eps=1e-6),
        "teneva": lambda: _teneva("add_many")([t.cores for t in terms], e=1e-6),
    }


def _apply(w: Matrix, x: Train, rank: int) -> Calls:
    return {
        OURS: lambda: tnlib.apply(w.ours, x.ours, max_rank=rank),
        "torchTT": lambda: (w.torch @ x.torch).round(eps=0.0, rmax=rank),
        "quimb": lambda: w.quimb.apply(x.quimb, compress=True, max_bond=rank, cutoff=0.0),
    }


def _expectation(w: Matrix, x: Train) -> Calls:
    return {
        OURS: lambda: tnlib.inner(x.ours, x.ours, w.ours),
        "torchTT": lambda: resolve("torchtt:bilinear_form")(x.torch, w.torch, x.torch),
    }


def _compressed(a: Matrix, b: Matrix, rtol: float) -> Calls:
    return {
        OURS: lambda: tnlib.round(a.ours @ b.ours, rtol=rtol),
        "torchTT": lambda: (a.torch @ b.torch).round(eps=rtol),
    }


def _dense_columns(w: Matrix, columns: int) -> Calls:
    n, d = w.cores[0].shape[2], len(w.cores)
    x = np.random.default_rng(SEED).standard_normal((n**d, columns))
    batch = _tensor(x.T.reshape(columns, *(n,) * d))
    return {OURS: lambda: w.ours @ x, "torchTT": lambda: w.torch @ batch}


def operations() -> dict[str, Callable[[], Calls]]:
    """Return the calls of all libraries, built on demand, by operation."""
    long, other = functools.cache(lambda: Train((2,) * 50, 30)), functools.cache(lambda: Train((2,) * 50, 30, 1))
    small = functools.cache(lambda: Train((4, 5, 6), 3))
    w = functools.cache(lambda: Matrix(2, 30, 5))
    a, b = (functools.cache(lambda seed=seed: Train((4,) * 10, 10, seed)) for seed in (0, 1))
    return {
        "tt_svd 4x5x6": lambda: _tt_svd(np.random.default_rng(SEED).standard_normal((4, 5, 6)), 1e-10, (1, 4, 6, 1)),
        "tt_svd 10^4": lambda: _tt_svd(_reciprocal(10, 4), 1e-6, (1, 6, 6, 6, 1)),
        "tt_svd 20^4": lambda: _tt_svd(_reciprocal(20, 4), 1e-6, (1, 7, 8, 7, 1)),
        "tt_svd 2^14": lambda: _tt_svd(_reciprocal(2, 14), 1e-6, (1, *(2, 3, 3, 3, 3, 3), 4, *(3, 3, 3, 3, 3, 2), 1)),
        "svd 50x40, rank 10": lambda: _svd(50, 40, 10),
        "svd 500x400, rank 10": lambda: _svd(500, 400, 10),
        "tucker 10^3, ranks 3": lambda: _tucker(10, 3),
        "tucker 30^3, ranks 5": lambda: _tucker(30, 5),
        "cp 10^3, rank 3": lambda: _cp(10, 3),
        "cp 30^3, rank 5": lambda: _cp(30, 5),
        "cross 20^4": lambda: _cross(20, 4),
        "constructor d=50": lambda: _constructor(long()),
        "one entry d=20": lambda: _one_entry(Train((10,) * 20, 10)),
        "entries 1,000": lambda: _entries(Train((10,) * 20, 10), 1000),
        "entries 20,000": lambda: _entries(Train((10,) * 20, 10), 20_000),
        "slice d=20": lambda: _slice(Train((10,) * 20, 10)),
        "full 4x5x6": lambda: _full(small()),
        "full 4^10, r=8": lambda: _full(Train((4,) * 10, 8)),
        "norm d=50, r=30": lambda: _norm(long()),
        "sum_legs d=50, r=30": lambda: _sum_legs(long()),
        "multiple d=50": lambda: _multiple(long()),
        "add d=50, r=30": lambda: _add(long(), other()),
        "inner d=50, r=30": lambda: _inner(long(), other()),
        "hadamard d=10, r=10": lambda: _pair(a(), b(), lambda x, y: x * y, lambda x, y: x * y, "mul"),
        "round 4 -> 2, d=10": lambda: _round(Train((2,) * 10, 4), 2),
        "round 20 -> 10, d=20": lambda: _round(Train((4,) * 20, 20), 10),
        "round 60 -> 30, d=30": lambda: _round(Train((2,) * 30, 60), 30),
        "sum of ten, rounded": lambda: _sum_of_ten((4,) * 20, 5),
        "canonicalize d=50, r=30": lambda: _canonicalize(long(), 49),
        "entropy at the centre": lambda: _entropy(long(), 25),
        "entropies d=50, r=30": lambda: _entropies(long()),
        "gate on two legs, r=32": lambda: _gate(Train((2,) * 20, 32), (9, 10)),
        "gate on two legs, r=4": lambda: _gate(Train((2,) * 20, 4), (9, 10)),
        "gate on one leg, r=4": lambda: _gate(Train((2,) * 20, 4), (9,)),
        "sample 10, d=50, r=10": lambda: _sample(Train((2,) * 50, 10), 10),
        "apply 5 x 20 -> 20": lambda: _apply(w(), Train((2,) * 30, 20), 20),
        "apply exact": lambda: _pair(w(), Train((2,) * 30, 20), lambda x, y: x @ y, lambda x, y: x @ y),
        "expectation": lambda: _expectation(w(), Train((2,) * 30, 20)),
        "operator product": lambda: _pair(w(), w(), lambda x, y: x @ y, lambda x, y: x @ y),
        "operator product, rounded": lambda: _compressed(w(), Matrix(2, 30, 5, 1), 1e-6),
        "kron of operators": lambda: _pair(w(), w(), tnlib.kron, resolve("torchtt:kron")),
        "operator 4^6 @ vector": lambda: _dense_columns(Matrix(4, 6, 4), 1),
        "operator 4^6 @ 64 columns": lambda: _dense_columns(Matrix(4, 6, 4), 64),
    }


def medians(calls: Calls, turns: int = TURNS) -> dict[str, float]:
    """Return the median CPU seconds of one call of each library, over rounds in which all take turns."""
    repeats, seconds = dict[str, int](), dict[str, list[float]]()
    for name, call in calls.items():
        start = time.process_time()
        call()
        call()
        repeats[name] = max(1, round(2 * LEAST / max(1e-6, time.process_time() - start)))
    for _ in range(turns):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                call()
            seconds.setdefault(name, []).append((time.process_time() - start) / repeats[name])
    return {name: float(np.median(values)) for name, values in seconds.items()}


def rows(words: Sequence[str] = ()) -> Iterator[tuple[str, float, str, float, str]]:
    """Yield operation, seconds of tnlib, its fastest peer, the ratio to that, and the seconds of all peers."""
    for name, build in operations().items():
        if words and not any(word in name for word in words):
            continue
        found = medians(build())
        ours = found.pop(OURS)
        best = min(found, key=lambda peer: found[peer])
        others = ", ".join(f"{peer} {1e3 * seconds:.3g}" for peer, seconds in found.items())
        yield name, ours, best, ours / found[best], others


def page() -> Iterator[str]:
    """Yield the lines of the page: what was done, when and where, the table, and a summary."""
    lines, ratios = [HEAD], list[float]()
    for row in rows():
        ratios.append(row[3])
        lines.append(_line(*row))
        print(lines[-1], flush=True)
    yield from ("# Everyday operations", "", ABOUT, "", textwrap.fill(measured_on(), 118, break_on_hyphens=False), "")
    slower = sum(ratio > GOAL for ratio in ratios)
    said = (
        f"Of {len(ratios)} operations, {sum(ratio <= 1 for ratio in ratios)} are at least as fast in tnlib as in the "
        f"fastest peer, and {slower} take more than {GOAL} times its time:"
    )
    yield from (textwrap.fill(said, 118), "", *lines)


def main() -> None:
    """Print the table of the operations named on the command line, or write the page of all."""
    warnings.simplefilter("ignore")
    words = sys.argv[1:]
    if words == ["--write"]:
        text = "\n".join(page()) + "\n"  # timed before the file is opened
        PAGE.write_text(text, encoding="utf-8")
        return
    print(HEAD)
    for row in rows(words):
        print(_line(*row), flush=True)


def _line(name: str, ours: float, best: str, ratio: float, others: str) -> str:
    return f"| {name} | {1e3 * ours:.3g} | {best} | {ratio:.2f} | {others} |"


if __name__ == "__main__":
    main()
