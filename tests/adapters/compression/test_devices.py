"""Passes and fits on another device: no tensor of the host takes part in a computation there.

Fake tensors have a device, shape and dtype, but no values; torch refuses to compute with tensors of two devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from compressed_folders import by_options, few_steps  # noqa: E402
from tnlib_adapters import Budget, Run  # noqa: E402
from tnlib_adapters.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from tnlib_adapters.compression.calibration import group_moments  # noqa: E402
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, rounded, whole_part  # noqa: E402
from tnlib_adapters.factors.projections import NAMES  # noqa: E402
from tnlib_adapters.instrument import layer_fit, weight_inputs  # noqa: E402
from tnlib_adapters.instrument.block import Block  # noqa: E402
from tnlib_adapters.instrument.block_passes import OuterLayers, run_block  # noqa: E402
from tnlib_adapters.instrument.fitted_block import FittedBlock  # noqa: E402
from tnlib_adapters.instrument.running_model import open_running  # noqa: E402
from tnlib_adapters.instrument.stored_weights import Placement  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from transformers_models import made_up_text, weights_in  # noqa: E402

from tnlib import ArgumentError  # noqa: E402

DEVICE = torch.device("lazy:0")  # a name that this build of torch knows; nothing runs there


class FewStreams:
    """In the place of streams in files: those of one batch, of fake tensors."""

    fitted = range(1)

    def __init__(self, batch: Any, stream: Any, call: Any) -> None:
        self._stream, self.batches, self.calls = stream, [batch], [[call, call]]

    def original(self, _k: int, _b: int) -> Any:
        return self._stream

    truncated = original


@pytest.fixture(params=["llama", "bert", "gpt2_lm"])
def folder(folders: Any, request: pytest.FixtureRequest) -> Path:
    return folders[request.param]


@pytest.fixture
def fake(folder: Path) -> Iterator[None]:  # `folder` is written with values
    with FakeTensorMode(shape_env=ShapeEnv()):
        yield


def halves(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rank = max(1, min(matrix.shape) // 2)
    return np.zeros((len(matrix), rank), np.float32), np.zeros((rank, matrix.shape[1]), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("max_weights", [0, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_passes_and_fit_compute_on_the_device(folder, dtype, max_weights, monkeypatch):
    checkpoint, hosted = open_checkpoint(folder), []

    def to_host(value: Any) -> np.ndarray:
        hosted.append(value.dtype)
        return np.zeros(1, np.float32)

    monkeypatch.setattr(group_moments, "on_host", to_host)
    projections, matrices = checkpoint.projections(1), checkpoint.wiring.layers[1].feed_forward_matrices
    weights = {name: projections.weights[name] for name in NAMES}
    weights |= {own.name: own.on_rows(checkpoint.read(own.weight)) for own in matrices}
    with FakeTensorMode(shape_env=ShapeEnv()):
        model = open_running(folder, placement=Placement(DEVICE, dtype), max_weights=max_weights)
        batch, generator = model.batches(made_up_text(8))[-1], torch.Generator().manual_seed(0)
        assert batch.ids.device == DEVICE
        outer, uses = OuterLayers(model), weight_inputs.find_uses(model, weights_in(model, "linear"))
        with torch.no_grad():
            x, calls = outer.enter(batch)
            out = run_block(model, 1, x, calls[1])
        assert (out.device, out.dtype) == (DEVICE, dtype)
        gradient = weight_inputs.observe_output(outer, out, batch, {}, generator)[2]
        of_block = weight_inputs.of_group(uses, 1)
        reads, slopes, at_stream = weight_inputs.observe_block(model, 1, x, calls[1], batch, of_block, gradient)
        assert {own.dtype for own in (*reads.values(), *slopes.values())} == {torch.float32}
        assert at_stream.device == DEVICE
        sums = group_moments.MomentSums(None, DEVICE)
        for key, own in reads.items():
            sums.add(key, own)
        assert sums.finish().keys() == reads.keys()
        assert len(hosted) == len(reads)
        assert set(hosted) == {torch.float32}
        fit(model, batch, out, calls[1], weights, projections.biases)
        if model.fits_in_memory:
            fit_integers(model, x, calls[1], weights)


def fit(model: Any, batch: Any, stream: Any, call: Any, weights: dict[str, Any], biases: dict[str, Any]) -> None:
    """Take a step of the fit of a layer."""
    streams, matrices = FewStreams(batch, stream, call), []
    for name, weight in weights.items():
        of, module = (name, "") if name in NAMES else ("", name)
        factors = dict(zip(("left", "right"), halves(weight), strict=True))
        bias = {"bias": biases[name]} if name in biases else {}
        matrices.append(FactoredMatrix("low_rank", of, factors | bias, module=module))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__float__", lambda _: 1.0)
        fitted = FittedBlock(Block(model, 1), matrices)
        layer_fit._add_gradients(fitted, 1, streams, 0)
    values = [own.values() for own in fitted.factors]
    assert {own.grad for own in values} == {None}  # taken
    assert {own.device for own in values} == {DEVICE}
    assert {own.dtype for own in values} == {torch.float32}


def fit_integers(model: Any, stream: Any, call: Any, weights: dict[str, Any]) -> None:
    """Take the gradients of the scales and vectors of a rounded block, and a step of its codes."""
    matrices = []
    for name, weight in weights.items():
        of, module = (name, "") if name in NAMES else ("", name)
        whole = FactoredMatrix("dense", of, {whole_part(of): np.zeros(weight.shape, np.float32)}, module=module)
        matrices.append(rounded(whole, 3))
    block = FittedBlock(Block(model, 1), matrices, with_vectors=True)
    descents = [own.descent for own in (*block.integers, *block.factors)]
    matrices = [own.codes for own in block.integers] + [own.values() for own in block.factors]
    x = stream.detach().float().requires_grad_()
    block.run(x, call).sum().backward()
    assert len(descents) >= len(matrices)
    assert {own.device for descent in descents for own in (descent._rows, descent._columns)} == {DEVICE}
    assert {own.device for own in matrices} == {DEVICE}
    assert {own.grad for own in matrices} == {None}  # taken
    moves = [moved.move for moved in block.moved]
    assert len(moves) > len(matrices)
    assert {own.device for move in moves for own in (move, move.grad)} == {DEVICE}
    assert {move.grad.dtype for move in moves} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [{"keep": 0.5}, {"bits": 4}], ids=str)
def test_half_precision_compresses_as_single_precision_does(folders, tmp_path, monkeypatch, dtype, size):
    few_steps(monkeypatch, 2)
    text, losses = tmp_path / "text.txt", []
    text.write_text(made_up_text(300), encoding="utf-8")
    for name in ("float32", dtype):
        tnlib_adapters.compress(folders["llama"], tmp_path / name, **by_options(calibrate=text, dtype=name, **size))
        # in single precision, whatever the dtype of the calibration
        losses.append(tnlib_adapters.evaluate(folders["llama"], tmp_path / name, text).divergence)
    single, half = losses
    assert 0 < half < 1.5 * single + 1e-6


def test_a_device_that_torch_does_not_reach_is_refused_before_any_work(folders, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(made_up_text(30), encoding="utf-8")
    for options, message in (
        ({"device": "abacus"}, "device must be one that torch computes on here"),
        ({"device": "meta"}, "device must be one that torch computes on here"),
        ({"dtype": "int8"}, "dtype must be one of 'float32'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tnlib_adapters.compress(
                folders["llama"], tmp_path / "out", **by_options(keep=0.5, calibrate=text, **options)
            )
        with pytest.raises(ArgumentError, match=message):
            tnlib_adapters.evaluate(folders["llama"], folders["llama"], text, **options)
    with pytest.raises(ArgumentError, match="those of a model that runs on a text"):
        tnlib_adapters.compress(
            folders["llama"], tmp_path / "out", Budget(keep=0.5), what="attention", run=Run(device="cuda")
        )
    assert not (tmp_path / "out").exists()
