"""The registry's part on trains: rounded, summed and rounded, met in an inner product, met by an operator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.cases import Case, Pair
from benchmarks.entry import (
    SPLIT,
    Entry,
    per_bond,
    quimb_cores,
    quimb_state,
    resolve,
    tnlib_cores,
    torch_train,
    unchanged,
)


def _tnlib(cores: Sequence[np.ndarray], _: Case) -> Any:
    return resolve("tnlib:TTMatrix" if cores[0].ndim == 4 else "tnlib:TensorTrain")(cores)


def _both(prepare: Callable[[Sequence[np.ndarray], Case], Any]) -> Callable[[Pair, Case], Any]:
    return lambda pair, case: (prepare(pair.a, case), prepare(pair.b, case))


# ---- train -> smaller train


def _quimb_round(method: str) -> Callable[[Any, Any, Case], Any]:
    def run(_: Any, state: Any, case: Case) -> Any:
        rounded = state.copy()
        rounded.compress(method=method, cutoff=per_bond(case) ** 2, cutoff_mode="rsum2")
        return rounded

    return run


ROUND = (
    Entry(
        "tnlib",
        "tnlib:round",
        lambda round, train, case: round(train, rtol=case.rtol),
        tnlib_cores,
        "round(train, rtol=rtol)",
        prepare=_tnlib,
    ),
    Entry(
        "torchTT",
        "torchtt:TT",
        lambda _, train, case: train.round(eps=case.rtol),
        lambda train: train.cores,
        "TT(cores).round(eps=rtol)",
        prepare=torch_train,
        exact=True,
    ),
    Entry(
        "teneva, Gram mode",
        "teneva:truncate",
        lambda truncate, cores, case: truncate(cores, e=case.rtol),
        unchanged,
        "truncate(cores, e=rtol)",
    ),
    Entry(
        "teneva",
        "teneva:truncate",
        lambda truncate, cores, case: truncate(cores, e=case.rtol, is_eigh=False),
        unchanged,
        "truncate(cores, e=rtol, is_eigh=False)",
        exact=True,
    ),
    Entry(
        "quimb, Gram mode",
        "quimb.tensor:MatrixProductState",
        _quimb_round("svd:eig"),
        quimb_cores,
        f"state.compress(method='svd:eig', cutoff_mode='rsum2', cutoff=({SPLIT})**2)",
        prepare=quimb_state,
    ),
    Entry(
        "quimb",
        "quimb.tensor:MatrixProductState",
        _quimb_round("svd"),
        quimb_cores,
        f"state.compress(method='svd', cutoff_mode='rsum2', cutoff=({SPLIT})**2)",
        prepare=quimb_state,
        exact=True,
    ),
)

# ---- two trains -> their sum, rounded


def _quimb_add(_: Any, states: Any, case: Case) -> Any:
    total = states[0].add_MPS(states[1])
    total.compress(cutoff=per_bond(case) ** 2, cutoff_mode="rsum2")
    return total


ADD = (
    Entry(
        "tnlib",
        "tnlib:round",
        lambda round, pair, case: round(pair[0] + pair[1], rtol=case.rtol),
        tnlib_cores,
        "round(a + b, rtol=rtol)",
        prepare=_both(_tnlib),
    ),
    Entry(
        "torchTT",
        "torchtt:TT",
        lambda _, pair, case: (pair[0] + pair[1]).round(eps=case.rtol),
        lambda train: train.cores,
        "(a + b).round(eps=rtol)",
        prepare=_both(torch_train),
        exact=True,
    ),
    Entry(
        "teneva",
        "teneva:truncate",
        lambda truncate, pair, case: truncate(resolve("teneva:add")(pair.a, pair.b), e=case.rtol, is_eigh=False),
        unchanged,
        "truncate(add(a, b), e=rtol, is_eigh=False)",
        exact=True,
    ),
    Entry(
        "quimb",
        "quimb.tensor:MatrixProductState",
        _quimb_add,
        quimb_cores,
        f"a.add_MPS(b).compress(cutoff_mode='rsum2', cutoff=({SPLIT})**2)",
        prepare=_both(quimb_state),
        exact=True,
    ),
)

# ---- two trains -> their inner product


def _number(x: Any) -> list[Any]:
    return [np.array([float(x)])]


INNER = (
    Entry(
        "tnlib",
        "tnlib:inner",
        lambda inner, pair, _: inner(*pair),
        _number,
        "inner(a, b)",
        prepare=_both(_tnlib),
        exact=True,
    ),
    Entry(
        "torchTT",
        "torchtt:dot",
        lambda dot, pair, _: dot(*pair),
        _number,
        "dot(a, b)",
        prepare=_both(torch_train),
        exact=True,
    ),
    Entry(
        "teneva",
        "teneva:mul_scalar",
        lambda mul_scalar, pair, _: mul_scalar(pair.a, pair.b),
        _number,
        "mul_scalar(a, b)",
        exact=True,
    ),
    Entry(
        "quimb",
        "quimb.tensor:MatrixProductState",
        lambda _, pair, case: pair[0].H @ pair[1],
        _number,
        "a.H @ b",
        prepare=_both(quimb_state),
        exact=True,
    ),
)

# ---- operator and train -> the product, compressed


def quimb_operator(cores: Sequence[np.ndarray], case: Case) -> Any:
    if cores[0].ndim == 3:
        return quimb_state(cores, case)
    turned = [core.transpose(0, 3, 1, 2) for core in cores]  # l r m n
    operators = resolve("quimb.tensor:MatrixProductOperator")
    return operators([turned[0][0], *turned[1:-1], turned[-1][:, 0]], shape="lrud")


def _quimb_apply(method: str) -> Callable[[Any, Any, Case], Any]:
    def run(compress: Any, pair: Any, case: Case) -> Any:
        network = importlib.import_module("quimb.tensor").tensor_network_apply_op_vec(*pair, contract=False)
        accuracy = {"cutoff": per_bond(case) ** 2, "cutoff_mode": "rsum2"}
        out = compress(network, method=method, **(accuracy if method == "zipup" else {"max_bond": case.rank}))
        return out.view_as_(type(pair[1]), inplace=True, like=pair[1])

    return run


APPLY = (
    Entry(
        "tnlib",
        "tnlib:apply",
        lambda apply, pair, case: apply(*pair, rtol=case.rtol),
        tnlib_cores,
        "apply(a, x, rtol=rtol)",
        prepare=_both(_tnlib),
        exact=True,
    ),
    Entry(
        "torchTT",
        "torchtt:TT",
        lambda _, pair, case: (pair[0] @ pair[1]).round(eps=case.rtol),
        lambda train: train.cores,
        "(a @ x).round(eps=rtol)",
        prepare=_both(torch_train),
        exact=True,
    ),
    Entry(
        "torchTT, by sweeps",
        "torchtt:TT",
        lambda _, pair, case: pair[0].fast_matvec(pair[1], eps=case.rtol / 2).round(eps=case.rtol / 2),
        lambda train: train.cores,
        "a.fast_matvec(x, eps=rtol / 2).round(eps=rtol / 2); without the second call its ranks are too large",
        prepare=_both(torch_train),
    ),
    Entry(
        "quimb, zip-up",
        "quimb.tensor:tensor_network_1d_compress",
        _quimb_apply("zipup"),
        quimb_cores,
        f"tensor_network_1d_compress(a x, method='zipup', cutoff_mode='rsum2', cutoff=({SPLIT})**2)",
        prepare=_both(quimb_operator),
        exact=True,
    ),
    Entry(
        "quimb, randomized",
        "quimb.tensor:tensor_network_1d_compress",
        _quimb_apply("src-oversample"),
        quimb_cores,
        "tensor_network_1d_compress(a x, method='src-oversample', max_bond=rank); the true rank is passed",
        prepare=_both(quimb_operator),
    ),
)
