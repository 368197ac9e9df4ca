"""A budget of multiplications per token beside that of stored numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner
from tnlib_adapters import cli, compress
from tnlib_adapters.compression.allocate import lost_by
from tnlib_adapters.compression.methods.components import components
from tnlib_adapters.compression.methods.factorisation import Factorisation
from tnlib_adapters.compression.methods.other_matrices import Matrix

pytestmark = pytest.mark.usefixtures("without_pictures")
SHAPES = {"square": (12, 12), "wide": (10, 24), "table": (60, 8)}


def factorisation(seed: int) -> Factorisation:
    """Matrices of falling singular values; the last is only looked up."""
    rng, parts = np.random.default_rng(seed), {}
    for name, (m, n) in SHAPES.items():
        k = min(m, n)
        weight = rng.standard_normal((m, k)) * 0.7 ** np.arange(k) @ rng.standard_normal((k, n))
        is_table = name == "table"
        parts[name] = Matrix(name, weight, 0, components(weight), gauged=not is_table, looked_up=is_table)
    return Factorisation("calibrated", parts, sum(math.prod(shape) for shape in SHAPES.values()))


def multiplications(name: str, rank: int | None) -> int:
    m, n = SHAPES[name]
    if name == "table":
        return 0 if rank is None else rank * n
    return m * n if rank is None else min(rank * (m + n), m * n)


@given(st.floats(0.1, 1.0), st.floats(0.05, 1.0), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_both_budgets_are_met(keep: float, flops: float, seed: int) -> None:
    whole = factorisation(seed)
    plan = whole.plan_of(whole.choose(keep, flops))
    ranks = {
        name: None if own[0].kind == "dense" else own[0].arrays["right"].shape[0] for name, own in plan.matrices.items()
    }
    before, after = plan.flops or (0, 0)
    assert after == sum(multiplications(name, rank) for name, rank in ranks.items())
    assert before == sum(multiplications(name, None) for name in ranks)
    assert after <= flops * before
    assert plan.n_after <= keep * plan.n_before


@pytest.mark.parametrize("keep", [0.3, 0.6])
def test_the_loss_falls_with_either_budget(keep: float) -> None:
    whole = factorisation(0)
    curves = [curve for part in whole.parts.values() for curve in part.curves]
    losses = [lost_by(curves, whole.choose(keep, flops)) for flops in (0.2, 0.5, 1.0)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] <= (1 + 1e-12) * lost_by(curves, whole.choose(keep))
    assert lost_by(curves, whole.choose(0.9, 0.5)) <= losses[1]


def test_numbers_that_are_left_over_go_to_the_table() -> None:
    whole = factorisation(1)
    free, limited = whole.plan_of(whole.choose(0.5)), whole.plan_of(whole.choose(0.5, 0.3))
    assert limited.numbers["table"] > free.numbers["table"]
    assert limited.numbers["wide"] < free.numbers["wide"]


def ranks_and_shapes(folder: Path) -> list[tuple[int, int, int]]:
    """Rank, inputs and outputs of all factored linear layers, from config.json."""
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    described = [entry for layer in section["layers"] for entry in layer]
    described += [entry for name, entry in section["modules"].items() if "embeddings" not in name]
    shapes = [entry["shapes"] for entry in described if entry["kind"] == "interpolative"]
    return [(s["right"][0], s["left"][0] + s["right"][0], s["right"][1]) for s in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"keep": 0.5, "flops": 0.3}, {"flops": 0.3}], ids=str)
def test_a_model_is_within_its_budget(
    options: dict[str, Any], folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    report = compress(folders["bert"], tmp_path / "out", what="all", calibrate=text, **options)
    assert report.flops["after"] <= 0.3 * report.flops["before"]
    assert report.n_after <= options.get("keep", 1.0) * report.n_before
    layers = ranks_and_shapes(tmp_path / "out")
    assert len(layers) == 18  # six weights in three layers: none stays dense
    table = next(matrix for matrix in report.matrices if matrix.role == "embedding")
    looked_up = 0 if table.kind == "dense" else table.n_after // (50 + 24) * 24
    assert report.flops["after"] == sum(r * (m + n) for r, m, n in layers) + looked_up


@pytest.mark.slow
def test_the_command_prints_the_multiplications(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    command = ["compress", str(folders["bert"]), str(tmp_path / "out"), "--calibrate", str(text), "--flops", "0.5"]
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 0, result.output
    assert "multiplications per token" in result.stdout
