"""A format of one file: registered, it is rounded, multiplied, converted, indexed, saved, loaded and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib
from tnlib import LinearFormat, Operator, register
from tnlib._stored_arrays import as_stored
from tnlib.drawing import Diagram, Leg, Node
from tnlib.linalg.scaling import Scaled, norm
from tnlib.linalg.truncation import TruncationBudget


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(LinearFormat, Operator):
    """A diagonal matrix (n, n) with `values` (r,) at different `positions` and zeros elsewhere."""

    values: np.ndarray
    positions: tuple[int, ...]
    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", as_stored("Diagonal", "values", self.values, ndim=1))
        object.__setattr__(self, "positions", tuple(map(int, self.positions)))

    def named_arrays(self) -> dict[str, np.ndarray]:
        return {"values": self.values}

    def attributes(self) -> dict[str, Any]:
        return {"positions": list(self.positions), "n": self.n}

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> Diagonal:
        return cls(arrays["values"], tuple(attributes["positions"]), attributes["n"])

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.n

    @property
    def ranks(self) -> tuple[int, ...]:
        return (len(self.values),)

    def diagonal(self) -> np.ndarray:
        out = np.zeros(self.n, self.dtype)
        out[list(self.positions)] = self.values
        return out

    def full(self) -> np.ndarray:
        return np.diag(self.diagonal())

    def norm(self) -> float:
        return norm(self.values)

    def conj(self) -> Diagonal:
        return Diagonal(self.values.conj(), self.positions, self.n)

    def _part(self, *, imaginary: bool) -> Diagonal:
        return Diagonal(self.values.imag if imaginary else self.values.real, self.positions, self.n)

    def _multiplied(self, number: Any) -> Diagonal:
        return Diagonal(number * self.values, self.positions, self.n)

    def _added(self, other: Diagonal) -> Diagonal:
        return Diagonal(self.diagonal() + other.diagonal(), range(self.n), self.n)

    def _matmat(self, x: np.ndarray) -> np.ndarray:
        return self.diagonal()[:, None] * x

    def _rmatmat(self, x: np.ndarray) -> np.ndarray:
        return self.diagonal().conj()[:, None] * x


def round_diagonal(t: Diagonal, rtol: float | None, max_rank: int | None) -> tuple[Diagonal, TruncationBudget]:
    """Keep the largest values, the singular values of the matrix."""
    order = np.argsort(-np.abs(t.values), kind="stable")
    s = np.abs(t.values)[order]
    budget = TruncationBudget(norm(s), rtol, [t.n], t.dtype, max_rank)
    kept = order[: budget.truncate(s)]
    return Diagonal(t.values[kept], [t.positions[k] for k in kept], t.n), budget


def inner_diagonals(a: Diagonal, b: Diagonal) -> Scaled:
    return Scaled(np.asarray(np.vdot(a.diagonal(), b.diagonal())))


def diagonal_to_train(t: Diagonal) -> tnlib.TensorTrain:
    units = np.eye(t.n, dtype=t.dtype)[:, list(t.positions)]
    return tnlib.TensorTrain([(units * t.values)[None], units.T[:, :, None]])


def diagonal_diagram(t: Diagonal) -> Diagram:
    legs = (Leg(0, None, "k0", t.n, (-1.0, 0.0)), Leg(0, None, "b0", t.n, (1.0, 0.0)))
    return Diagram((Node("weights", "d", (0.0, 0.0)),), legs, "Diagonal")


register(
    Diagonal, round=round_diagonal, inner=inner_diagonals, to_TensorTrain=diagonal_to_train, diagram=diagonal_diagram
)


@pytest.fixture(params=oracles.DTYPES, ids=str)
def value(request: pytest.FixtureRequest) -> Diagonal:
    values = np.array([3, -4, 0.5, 1e-3]) * (1 if request.param.kind == "f" else np.exp(0.3j))
    return Diagonal(values.astype(request.param), (4, 0, 5, 2), 6)


def test_round(value: Diagonal) -> None:
    for rtol, rank in ((None, 4), (1e-2, 3), (0.2, 2), (0.7, 1)):
        fit = tnlib.round(value, rtol=rtol)
        oracles.assert_fit(fit, value.full(), rtol=rtol)
        assert fit.value.ranks == (rank,)
    assert tnlib.round(value, max_rank=1).value.positions == (0,)
    with pytest.warns(tnlib.DegenerateCutWarning, match="round: max_rank separates equal"):
        tnlib.round(Diagonal(np.ones(3), (0, 1, 2), 3), max_rank=2)


def test_inner_and_distance(value: Diagonal) -> None:
    other = Diagonal(np.arange(1.0, 7.0), range(6), 6)
    want = np.vdot(value.full(), other.full())
    assert tnlib.inner(value, other) == pytest.approx(want, rel=1e-6)
    far = np.linalg.norm(value.full() - other.full())
    train = tnlib.tt_svd(other.full()).value
    for right in (other, train, tnlib.svd(other.full()).value):
        if isinstance(right, tnlib.SVD):
            right = tnlib.convert(right, tnlib.LowRank)
        assert tnlib.inner(value, right) == pytest.approx(want, rel=1e-6)
        assert tnlib.distance(value, right) == pytest.approx(far, rel=1e-6)


def test_conversions_and_entries(value: Diagonal) -> None:
    for kind in (tnlib.TensorTrain, tnlib.LowRank, tnlib.Tucker, tnlib.CP):
        got = tnlib.convert(value, kind)
        assert isinstance(got, kind)
        oracles.assert_close(got.full(), value.full(), value.dtype)
    assert tnlib.convert(value, Diagonal) is value
    points = [[0, 0], [0, 1], [-1, -1]]
    oracles.assert_close(tnlib.entries(value, points), value.full()[[0, 0, -1], [0, 1, -1]], value.dtype)
    with oracles.refused(TypeError, "convert: t must be one that a Diagonal holds exactly", "another format"):
        tnlib.convert(tnlib.convert(value, tnlib.LowRank), Diagonal)


def test_files(value: Diagonal, tmp_path: Path) -> None:
    tnlib.save(tmp_path / "a", value)
    loaded = tnlib.load(tmp_path / "a")
    oracles.assert_same_bits(loaded, value)
    assert (loaded.positions, loaded.n) == (value.positions, value.n)


def test_pictures(value: Diagonal, tmp_path: Path) -> None:
    picture = tnlib.draw(value)
    assert picture.diagram.open_legs == (("k0", 6), ("b0", 6))
    picture.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 100


def test_what_all_formats_offer(value: Diagonal) -> None:
    wider = value.astype(np.complex128)
    assert (wider.dtype, value.ndim, value.size) == (np.complex128, 2, 36)
    oracles.assert_close(value.real.full(), value.full().real, value.dtype)
    oracles.assert_close((value @ np.ones(6)), value.full() @ np.ones(6), value.dtype)
    oracles.assert_close((2 * value - value).full(), value.full(), value.dtype)


def test_verbs_that_it_lacks_name_the_formats_that_have_them(value: Diagonal) -> None:
    with oracles.refused(TypeError, "kron: a and b must", "TensorTrain, TTMatrix", "got a Diagonal"):
        tnlib.kron(value, value)
    with oracles.refused(TypeError, "canonical_form: t must be a TensorTrain", "got a Diagonal"):
        tnlib.canonical_form(value)
    with oracles.refused(TypeError, "round: t must be a TensorTrain", "got a ndarray"):
        tnlib.round(value.full())  # type: ignore[type-var]


class Unregistered(Diagonal):
    """A subclass: verbs are inherited, files are not."""


def test_subclasses(value: Diagonal, tmp_path: Path) -> None:
    sub = Unregistered(value.values, value.positions, value.n)
    assert tnlib.round(sub, max_rank=2).value.ranks == (2,)
    with oracles.refused(TypeError, "save: value must be a format of tnlib", "Unregistered"):
        tnlib.save(tmp_path / "a", sub)
