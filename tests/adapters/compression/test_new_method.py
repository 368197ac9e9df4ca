"""A compression method added in one file: a row of the table is all that compression and reloading need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from compressed_folders import read_config
from oracles import assert_close, refused
from slow_cases import mostly_slow
from tnlib_adapters import Budget, compress, open_checkpoint
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.method_table import EVERYWHERE, METHODS, TABLE, Method, register
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.reference.model import run

from tnlib import ArgumentError


class PivotedQR:
    """The first columns of a pivoted QR decomposition."""

    def __init__(self, weight: np.ndarray) -> None:
        q, r, pivots = scipy.linalg.qr(weight, mode="economic", pivoting=True)
        self.q, self.r = q, r[:, np.argsort(pivots)]
        squares = np.sum(np.square(r, dtype=np.float64), axis=1)
        lost = np.append(np.cumsum(squares[::-1])[::-1], 0.0) / (squares.sum() or 1.0)
        self.curve = Curve(np.arange(1, len(r) + 1) * sum(weight.shape), lost[1:])

    def at(self, option: int) -> FactoredMatrix:
        rank = option + 1
        return FactoredMatrix("low_rank", "", {"left": self.q[:, :rank], "right": self.r[:rank]})


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(
        Method(
            name="qr",
            help="each weight by pivoted QR",
            unit="matrix",
            factorise=PivotedQR,
            applies_to=EVERYWHERE,
        )
    )
    yield
    del TABLE["qr"]


@pytest.mark.parametrize("what", mostly_slow(["attention", "mlp", "all"], ["all"]))
def test_it_compresses_and_reloads(what: str, folders: Any, tmp_path: Path, without_pictures: None) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    pytest.importorskip("tnlib_adapters.transformers_plugin")
    source, out = folders["bert"], tmp_path / "out"
    report = compress(source, out, Budget(keep=0.5), what=what, method="qr")
    assert report.method == "qr"
    assert 0.49 <= report.kept <= 0.5
    assert report.measured == pytest.approx(report.predicted, rel=1e-4)
    section = read_config(out)["quantization_config"]
    kinds = {one["kind"] for layer in section["layers"] for one in layer}
    kinds |= {one["kind"] for one in section.get("modules", {}).values()}
    assert kinds - {"dense"} == {"low_rank"}

    tokens = np.random.default_rng(0).integers(1, 40, size=(2, 9))
    wanted = run(open_checkpoint(out), tokens).hidden
    assert np.linalg.norm(wanted - run(open_checkpoint(source), tokens).hidden) > 1e-3 * np.linalg.norm(wanted)
    model = transformers.AutoModel.from_pretrained(out).eval()
    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(tokens)).last_hidden_state.numpy()
    assert_close(found, wanted, np.float32, factor=4096)


@pytest.mark.usefixtures("without_pictures")
def test_its_operators_have_larger_errors_than_truncated_singular_values(folders: Any, tmp_path: Path) -> None:
    reports = [
        compress(folders["bert"], tmp_path / name, Budget(keep=0.5), method=name, what="attention")
        for name in ("matrix", "qr")
    ]
    matrix, qr = (sum(layer.ov_error for layer in report.layers) for report in reports)
    assert matrix < qr


def test_its_name_is_known_everywhere(tmp_path: Path, folders: Any) -> None:
    assert "qr" in METHODS
    with refused(ArgumentError, "method must be one of heads, matrix, ttm, tucker, cp", ", qr, or", "'fourier'"):
        compress(folders["bert"], tmp_path / "out", Budget(keep=0.5), method="fourier", what="attention")
    with refused(ArgumentError, "what='mlp' works with method", "'qr'", "got 'tucker'"):
        compress(folders["bert"], tmp_path / "out", Budget(keep=0.5), what="mlp", method="tucker")
