"""Any sequence of operations on a train, an operator or a Tucker tensor, beside the same operations on arrays."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from gauge_changes import invertible
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from slow_cases import mostly_slow

import tnlib

SEEDS = st.integers(0, 999)
CONDITION = 4.0  # of a change of gauge
LARGEST_RANK, LARGEST_CONDITION, LARGEST_NORM = 12, 1e3, 1e6


class Twins(RuleBasedStateMachine):
    """A value, its dense twin, and a bound on their distance: that of all roundings, carried along, and roundoff.

    Roundoff of an operation is a multiple of eps and of the norms of its operands, times the condition of the gauge.
    """

    value: Any
    twin: Any
    bound, condition = 0.0, 1.0

    def random(self, seed: int) -> Any:
        """Return a random value of the same legs and dtype."""
        raise NotImplementedError

    @initialize(dtype=st.sampled_from(oracles.DTYPES), seed=SEEDS)
    def begin(self, dtype: np.dtype, seed: int) -> None:
        self.dtype = dtype
        value = self.random(seed)
        self.twin = oracles.wide(oracles.contract(value))
        self.take(value, self.twin)

    @property
    def size(self) -> float:
        return oracles.norm(self.twin) + self.bound

    @property
    def is_small(self) -> bool:
        return max(self.value.ranks) <= LARGEST_RANK and self.size <= LARGEST_NORM

    def take(self, value: Any, twin: Any, *, size: float | None = None, factor: float = 1.0) -> None:
        """Go on with another pair; `factor` is the Lipschitz constant of the operation, `size` the norm of operands."""
        before = self.size * factor if size is None else size
        self.value, self.twin = value, twin
        self.bound = factor * self.bound + 500 * oracles.eps(self.dtype) * self.condition * max(before, self.size)

    @invariant()
    def agree(self) -> None:
        assert self.value.dtype == self.dtype
        assert self.value.shape == self.twin.shape
        assert oracles.norm(oracles.wide(oracles.contract(self.value)) - self.twin) <= self.bound
        assert oracles.norm(oracles.wide(self.value.full()) - self.twin) <= self.bound
        assert abs(self.value.norm() - oracles.norm(self.twin)) <= self.bound

    @rule(rtol=st.sampled_from([None, 1e-5, 1e-2, 0.3]))
    def round(self, rtol: float | None) -> None:
        fit, _ = oracles.quietly(lambda: tnlib.round(self.value, rtol=rtol))
        assert fit.converged
        assert fit.error <= (rtol or 1e3 * oracles.eps(self.dtype))
        assert all(r <= s for r, s in zip(fit.value.ranks, self.value.ranks, strict=True))
        self.bound += fit.error * self.size
        self.take(fit.value, self.twin)
        self.condition = 1.0

    @precondition(lambda self: self.size > 100 * self.bound)
    @rule()
    def fix_gauge(self) -> None:
        self.take(tnlib.canonical_form(self.value), self.twin)
        self.condition = 1.0

    @precondition(lambda self: self.is_small)
    @rule(seed=SEEDS, sign=st.sampled_from([1, -1]))
    def add(self, seed: int, sign: int) -> None:
        other = self.random(seed)
        dense = oracles.wide(oracles.contract(other))
        size = self.size + oracles.norm(dense)
        self.take(self.value + other if sign > 0 else self.value - other, self.twin + sign * dense, size=size)

    @precondition(lambda self: self.is_small)
    @rule(number=st.sampled_from([-2.0, 0.3, 1e-3, 700.0]), divide=st.booleans())
    def scale(self, number: float, divide: bool) -> None:
        factor = 1 / number if divide else number
        self.take(self.value / number if divide else number * self.value, factor * self.twin, factor=abs(factor))

    @rule()
    def conjugate(self) -> None:
        self.take(self.value.conj(), self.twin.conj())

    @rule(seed=SEEDS)
    def inner(self, seed: int) -> None:
        other = self.random(seed)
        dense = oracles.wide(oracles.contract(other))
        roundoff = 500 * oracles.eps(self.dtype) * self.condition * self.size
        assert abs(tnlib.inner(other, self.value) - np.vdot(dense, self.twin)) <= oracles.norm(dense) * (
            self.bound + roundoff
        )

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tnlib.save(Path(folder) / "value.safetensors", self.value)
            loaded = tnlib.load(Path(folder) / "value.safetensors")
        oracles.assert_same_bits(loaded, self.value)
        self.value = loaded


class TrainTwins(Twins):
    shape = (3, 2, 4, 3)

    def random(self, seed: int) -> Any:
        return tnlib.TensorTrain(oracles.random_cores(self.shape, (1, 2, 3, 2, 1), self.dtype, seed))

    @rule(center=st.integers(0, 3))
    def move_center(self, center: int) -> None:
        self.take(tnlib.canonicalize(self.value, center), self.twin)
        assert self.value.center == center
        self.condition = 1.0

    @precondition(lambda self: self.condition < LARGEST_CONDITION)
    @rule(bond=st.integers(1, 3), seed=SEEDS)
    def change_gauge(self, bond: int, seed: int) -> None:
        cores = [np.asarray(core) for core in self.value.cores]
        matrix = invertible(len(cores[bond]), self.dtype, seed, CONDITION)
        cores[bond - 1] = np.tensordot(cores[bond - 1], matrix, 1).astype(self.dtype)
        cores[bond] = np.tensordot(np.linalg.inv(matrix), cores[bond], 1).astype(self.dtype)
        self.condition *= CONDITION
        self.take(type(self.value)(cores, log_scale=self.value.log_scale), self.twin)

    @precondition(lambda self: self.is_small)
    @rule(seed=SEEDS)
    def multiply(self, seed: int) -> None:
        other = self.random(seed)
        dense = oracles.wide(oracles.contract(other))
        factor = oracles.norm(dense)
        self.take(self.value * other, self.twin * dense, factor=factor)


class OperatorTwins(TrainTwins):
    shape = (3, 2, 2, 3)

    def random(self, seed: int) -> Any:
        cores = oracles.random_cores([n * n for n in self.shape], (1, 2, 2, 2, 1), self.dtype, seed)
        return tnlib.TTMatrix(
            [core.reshape(len(core), n, n, -1) / n for core, n in zip(cores, self.shape, strict=True)]
        )

    @rule()
    def transpose(self) -> None:
        self.take(self.value.T, self.twin.T)

    @precondition(lambda self: self.is_small)
    @rule(seed=SEEDS, left=st.booleans())
    def compose(self, seed: int, left: bool) -> None:
        other = self.random(seed)
        dense = oracles.wide(oracles.contract(other))
        twin = dense @ self.twin if left else self.twin @ dense
        self.take(other @ self.value if left else self.value @ other, twin, factor=oracles.norm(dense))


class TuckerTwins(Twins):
    shape = (4, 3, 5)

    def random(self, seed: int) -> Any:
        factors = [oracles.normal((n, 2), self.dtype, seed + 7 * k) for k, n in enumerate(self.shape)]
        return tnlib.Tucker(oracles.normal((2, 2, 2), self.dtype, seed), factors)

    @precondition(lambda self: self.condition < LARGEST_CONDITION)
    @rule(leg=st.integers(0, 2), seed=SEEDS)
    def change_gauge(self, leg: int, seed: int) -> None:
        core, factors = self.value.core, list(self.value.factors)
        matrix = invertible(core.shape[leg], self.dtype, seed, CONDITION)
        factors[leg] = (factors[leg] @ matrix).astype(self.dtype)
        core = np.moveaxis(np.tensordot(np.linalg.inv(matrix), core, (1, leg)), 0, leg).astype(self.dtype)
        self.condition *= CONDITION
        self.take(tnlib.Tucker(core, factors), self.twin)


CASES = [(machine, *sizes) for machine in (TrainTwins, OperatorTwins, TuckerTwins) for sizes in ((8, 10), (200, 40))]


@pytest.mark.parametrize(("machine", "n_examples", "n_steps"), mostly_slow(CASES, [c for c in CASES if c[1] == 8]))
def test_any_sequence_of_operations(machine: type[Twins], n_examples: int, n_steps: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=n_examples, stateful_step_count=n_steps))
