"""Integers and factors fitted to the predictions of a language model: gradients, what changes and stays, refusal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tnlib_adapters.transformers_plugin")

from compressed_folders import read_tensors  # noqa: E402
from tnlib_adapters import Budget, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.calibration.factorise_and_fit import fit_steps  # noqa: E402
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, rounded, whole_part  # noqa: E402
from tnlib_adapters.factors.integers import IntegerFormat, Integers  # noqa: E402
from tnlib_adapters.instrument import fitted_block, output_fit  # noqa: E402
from tnlib_adapters.instrument.block_passes import Streams  # noqa: E402
from tnlib_adapters.instrument.fitted_block import Descent, MovedIntegers  # noqa: E402
from tnlib_adapters.instrument.running_model import RunningModel, open_running  # noqa: E402
from transformers_models import made_up_text, random_model, save_with_tokenizer  # noqa: E402

MODELS = ("llama", "gpt2", "qwen2")
VECTORS = ("norm", "LayerNorm", "ln_", "bias")


STEPS = {  # batches, effort, fits in memory, predicts -> steps of a layer, in bits or not, and of the whole model
    (16, "low", True, True): (0, 0, 0),
    (16, "default", True, True): (0, 32, 32),
    (70, "default", True, True): (0, 140, 140),
    (16, "high", True, True): (0, 400, 96),
    (16, "default", True, False): (32, 96, 0),
    (16, "default", False, True): (16, 16, 0),
}


@pytest.mark.parametrize("case", STEPS, ids=str)
@pytest.mark.parametrize("in_bits", [True, False], ids=["bits", "factors"])
def test_what_is_fitted(in_bits: bool, case: tuple[int, str, bool, bool]) -> None:
    """Language models are fitted as a whole, encoders, models beyond memory and factors layer by layer."""
    n_batches, effort, in_memory, predicts = case
    rounded, factors, of_model = STEPS[case]
    steps = fit_steps(n_batches, effort, in_bits=in_bits, fit_in_memory=in_memory, predicts=predicts)
    assert steps == (rounded if in_bits else factors, of_model)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_with_tokenizer(random_model(request.param), tmp_path / "model")


def changed_model(
    folder: Path, change: Callable[..., FactoredMatrix]
) -> tuple[RunningModel, Streams, dict[str, list[FactoredMatrix]]]:
    """A model, streams of a text, and its changed weights by module, biases of the attention included."""
    checkpoint, model = open_checkpoint(folder), open_running(folder, batch_tokens=64)
    matrices = dict[str, list[FactoredMatrix]]()
    for k, module in enumerate(checkpoint.wiring.attention_modules):
        projections = checkpoint.projections(k)
        matrices[module] = []
        for name, weight in projections.weights.items():
            bias = {"bias": projections.biases[name]} if name in projections.biases else {}
            whole = FactoredMatrix("dense", name, {whole_part(name): weight} | bias, module=module)
            matrices[module].append(change(whole, by_row=False))
    for name, linear in checkpoint.wiring.matrices.items():
        tensor = checkpoint.folder.tensors.get(linear.weight)
        if tensor is not None:
            weight = np.asarray(linear.on_rows(tensor.read()), np.float32)
            by_row = checkpoint.wiring.is_embedding(name)
            whole = FactoredMatrix("dense", "", {whole_part(""): weight}, module=name)
            matrices[name] = [change(whole, by_row=by_row)]
    batches = model.batches(made_up_text(40))
    return model, Streams(batches, model.sizes.d_model), matrices


def in_bits(matrix: FactoredMatrix, *, by_row: bool) -> FactoredMatrix:
    return rounded(matrix, 3, by_row=by_row)


def truncated(matrix: FactoredMatrix, *, by_row: bool) -> FactoredMatrix:
    """Most components of a weight in a block, its bias as a last row, but of "o"; tables stay."""
    if by_row:
        return matrix
    arrays = dict(matrix.arrays)
    weight = arrays.pop(whole_part(matrix.of))
    biases = matrix.of if "bias" in arrays and matrix.of != "o" else ""
    if biases:
        weight = np.concatenate([weight, arrays.pop("bias")[None]])
    u, s, vt = np.linalg.svd(weight, full_matrices=False)
    r = len(s) * 7 // 8
    factors = {"left": (u[:, :r] * s[:r]).astype(np.float32), "right": vt[:r].astype(np.float32)}
    return FactoredMatrix("low_rank", matrix.of, factors | arrays, biases=biases, module=matrix.module)


def moved_of(fit: output_fit._OutputFit) -> list[Any]:
    return [own for block in fit._blocks for own in block.moved]


def integers_of(fit: output_fit._OutputFit) -> list[MovedIntegers]:
    return [own for block in fit._blocks for own in block.integers]


def factors_of(fit: output_fit._OutputFit) -> list[Any]:
    return [own for block in fit._blocks for own in block.factors]


def keep_gradients(patch: pytest.MonkeyPatch) -> None:
    """Leave the gradients of codes and factors where they are."""
    patch.setattr(Descent, "step", lambda *_: None)


@pytest.mark.parametrize("folder", mostly_slow(MODELS, ["llama", "gpt2"]), indirect=True)
@pytest.mark.parametrize("change", [in_bits, truncated])
def test_gradients_are_those_of_the_error(
    change: Callable[..., FactoredMatrix], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along a random direction of all moves, and of factors, beside a central difference of the error."""
    keep_gradients(monkeypatch)
    model, streams, matrices = changed_model(folder, change)
    fit = output_fit._OutputFit(model, streams, matrices, with_vectors=True)
    n_moves = [sum(moved.move.numel() for moved in block.moved) for block in fit._blocks]
    assert min(n_moves) > 0
    factors = [own.values() for own in factors_of(fit)]
    assert (len(factors) > 10) == (change is truncated)
    moves = [*(moved.move for moved in moved_of(fit)), *factors]
    steps = [2e-3] * len(moved_of(fit)) + [2e-3 * float(factor.detach().abs().mean()) for factor in factors]
    starts = [move.detach().clone() for move in moves]
    fit.add_gradients(0)
    gradients = [move.grad.clone() * step for move, step in zip(moves, steps, strict=True)]
    generator = torch.Generator().manual_seed(0)
    direction = [torch.sign(torch.randn(g.shape, generator=generator)) * (g != 0) for g in gradients]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    errors = []
    for sign in (1, -1):
        with torch.no_grad():
            for move, start, d, step in zip(moves, starts, direction, steps, strict=True):
                move.copy_(start + sign * step * d)
        errors.append(fit.error([0]))
    batch = streams.batches[0]
    assert slope == pytest.approx((errors[0] - errors[1]) / 2 / batch.n_tokens, rel=0.03)


@pytest.mark.parametrize("folder", mostly_slow(MODELS, ["llama", "gpt2"]), indirect=True)
def test_gradients_of_codes_are_those_of_the_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value is the scale times the code minus its centre, so that gradients of codes give those of scales."""
    keep_gradients(monkeypatch)
    model, streams, matrices = changed_model(folder, in_bits)
    fit = output_fit._OutputFit(model, streams, matrices, with_vectors=False)
    fit.add_gradients(0)
    assert len(integers_of(fit)) > len(fit._blocks)
    for own in integers_of(fit):
        form, (axis,) = own._form, own._form.axes
        products = own.codes.grad * (own.codes.detach() - form.centre)
        groups = products.split(form.group_sizes(products.shape[axis]), axis)
        of_scales = torch.cat([group.sum(axis, keepdim=True) for group in groups], axis)
        bound = 1e-4 * float(own.move.grad.abs().max())
        assert torch.allclose(of_scales, own.move.grad, rtol=1e-4, atol=bound)
        assert bool(own.codes.grad.any())


def test_codes_move_by_gradients_relative_to_rows_and_columns() -> None:
    """Against their gradient, whatever its size in a row or column, and by a few times the rate at most."""
    moved = MovedIntegers(
        Integers(np.full((30, 20), 3, np.uint8), np.ones((1, 20), np.float32), IntegerFormat(3, 0)), torch.device("cpu")
    )
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-8, 2, (30, 1)) * 10.0 ** rng.uniform(-8, 2, (1, 20))
    signs = rng.choice([-1.0, 1.0], (30, 20))
    descent = moved.descent
    descent.rate = 0.1
    for step in (1, 2):  # gradients of one size: the mean squares are theirs from the first step on
        moved.codes.grad = torch.from_numpy(sizes * signs).float()
        moved.codes.grad[3, 4] *= 1e3
        descent.step(moved.codes)
        assert moved.codes.grad is None
        moves = (moved.codes.detach().numpy() - 3) * -signs / step
        assert np.allclose(np.delete(np.delete(moves, 3, 0), 4, 1), 0.1, rtol=1e-2)
        assert moves[3, 4] == pytest.approx(0.1 * fitted_block._LARGEST_GRADIENT, rel=1e-5)


def test_codes_at_the_end_of_their_range_come_back() -> None:
    """However far they are pushed: a code of 7 is at most a cell away from 6."""
    moved = MovedIntegers(
        Integers(np.full((4, 5), 6, np.uint8), np.ones((1, 5), np.float32), IntegerFormat(3, 0)), torch.device("cpu")
    )
    descent = moved.descent
    descent.rate = 0.3
    for _ in range(40):
        moved.codes.grad = torch.full((4, 5), -1.0)
        descent.step(moved.codes)
    assert np.all(moved.integers().codes == 7)
    for _ in range(4):
        moved.codes.grad = torch.full((4, 5), 1.0)
        descent.step(moved.codes)
    assert np.all(moved.integers().codes == 6)


@pytest.mark.parametrize("folder", mostly_slow(MODELS, ["llama", "gpt2"]), indirect=True)
@pytest.mark.parametrize("change", [in_bits, truncated])
def test_matrices_keep_their_form_and_the_error_falls(change: Callable[..., FactoredMatrix], folder: Path) -> None:
    model, streams, matrices = changed_model(folder, change)
    freed: list[bool] = []

    def progress(*_: int) -> None:
        freed.append(any(value.is_meta for value in model.model.parameters()))

    fitted, vectors = output_fit.fit_to_output(model, streams, matrices, 30, progress, with_vectors=True)
    assert all(freed)
    assert not any(value.is_meta for value in model.model.parameters())
    pairs = [pair for name in matrices for pair in zip(matrices[name], fitted[name], strict=True)]
    for before, after in pairs:
        assert before.describe() == after.describe()
        assert [a.dtype for a in after.arrays.values()] == [a.dtype for a in before.arrays.values()]
        for part, integers in before.integers.items():
            own = after.integers[part]
            assert own.format == integers.format
            assert own.codes.dtype == integers.codes.dtype
            assert own.codes.max() <= own.format.code_range[1]
            assert np.array_equal(own.format.stored_scales(own.scales), own.scales)
    if change is in_bits:
        both = [(a.integers[part], b.integers[part]) for a, b in pairs for part in a.integers]
        assert any(not np.array_equal(a.codes, b.codes) for a, b in both)
        assert sum(not np.array_equal(a.scales, b.scales) for a, b in both) > 4
    else:
        of_blocks = [(a, b) for a, b in pairs if a.kind == "low_rank" and not model.wiring.is_unembedding(a.module)]
        assert of_blocks
        assert not any(np.array_equal(a.arrays[part], b.arrays[part]) for a, b in of_blocks for part in a.arrays)
    assert vectors
    assert all(any(word in name for word in VECTORS) for name in vectors)
    stored = model.weights.source.stored
    moved = model.changed(
        lambda _, group: {
            name: torch.from_numpy(vectors[stored[name]]) if stored.get(name) in vectors else values
            for name, values in group.items()
        }
    )
    before, after = (
        output_fit._OutputFit(of_model, streams, of, with_vectors=False).error(range(1))
        for of_model, of in ((model, matrices), (moved, fitted))
    )
    assert after < before


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("change", [in_bits, truncated])
def test_a_fit_that_does_not_help_is_dropped(
    change: Callable[..., FactoredMatrix], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_fit, "_RATE", 0.0)
    for rate in ("_CODE_RATE", "_FACTOR_SHARE"):
        monkeypatch.setattr(fitted_block, rate, 0.0)
    model, streams, matrices = changed_model(folder, change)
    fitted, vectors = output_fit.fit_to_output(model, streams, matrices, 2, lambda *_: None, with_vectors=True)
    assert fitted is matrices
    assert vectors == {}


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_diverging_fit_is_repeated_at_a_lower_rate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted_block, "_CODE_RATE", 5.0)
    monkeypatch.setattr(fitted_block, "_CODE_WALK", 100.0)
    model, streams, matrices = changed_model(folder, in_bits)
    steps: list[tuple[int, int]] = []

    def progress(*step: int) -> None:
        steps.append(step)

    for attempts, helps in {(1.0,): False, (1.0, 0.005): True}.items():
        monkeypatch.setattr(output_fit, "_ATTEMPTS", attempts)
        steps.clear()
        fitted, _ = output_fit.fit_to_output(model, streams, matrices, 30, progress, with_vectors=True)
        assert (fitted is not matrices) == helps
        (total,) = {total for _, total in steps}
        assert [done for done, _ in steps] == [*range(total + 1)] * len(attempts)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_weight_that_is_copied_is_not_fitted(folder: Path) -> None:
    """A dense one, that is no projection, is that of the source in OUT."""
    model, streams, matrices = changed_model(folder, truncated)
    _, dense = changed_model(folder, lambda matrix, **_: matrix)[1:]
    name = next(name for name in matrices if "down_proj" in name)
    matrices |= {name: dense[name]} | {"layers.0.self_attn": dense["layers.0.self_attn"]}
    fitted, _ = output_fit.fit_to_output(model, streams, matrices, 4, lambda *_: None, with_vectors=False)
    assert fitted is not matrices
    (one,) = fitted[name]
    assert one is dense[name][0]
    projections = zip(fitted["layers.0.self_attn"], dense["layers.0.self_attn"], strict=True)
    assert not any(np.array_equal(a.arrays["weight"], b.arrays["weight"]) for a, b in projections)
    for of_first in ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.self_attn"):
        del matrices[of_first]  # no weight of the first block is fitted
    fitted, _ = output_fit.fit_to_output(model, streams, matrices, 4, lambda *_: None, with_vectors=False)
    assert fitted is not matrices


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("change", [in_bits, truncated])
def test_a_fit_leaves_nothing_in_memory(change: Callable[..., FactoredMatrix], folder: Path) -> None:
    """Tensors with hooks that hold them are never freed."""
    model, streams, matrices = changed_model(folder, change)
    fit = output_fit._OutputFit(model, streams, matrices, with_vectors=True)
    moved = [weakref.ref(own.codes) for own in integers_of(fit)] + [
        weakref.ref(own.values()) for own in factors_of(fit)
    ]
    fit.descend([1, 2], 1.0, 1e-3, lambda *_: None)
    del fit
    gc.collect()
    assert moved
    assert not any(own() is not None for own in moved)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_the_rate_of_factors_follows_from_the_error(folder: Path) -> None:
    """A sixth of the first step that doubles the error; the trials leave no trace."""
    model, streams, matrices = changed_model(folder, truncated)
    fit = output_fit._OutputFit(model, streams, matrices, with_vectors=True)
    starts, error = [own.values().detach().clone() for own in factors_of(fit)], fit.error([0])
    step = fit.find_factor_rate([1], [0]) / fitted_block._FACTOR_SHARE
    assert all(torch.equal(own.values(), start) for own, start in zip(factors_of(fit), starts, strict=True))
    assert not any(moved.move.any() or moved.move.grad is not None for moved in moved_of(fit))
    errors = []
    for tried in (step / 2, step):
        for own, start in zip(factors_of(fit), starts, strict=True):
            assert torch.equal(own.values(), start)
            own.descent.rate = tried
        fit.add_gradients(1)
        errors.append(fit.error([0]))
        for own in factors_of(fit):
            own.restart()
    assert step > fitted_block._TRIED_STEPS[0]
    assert errors[0] < 2 * error <= errors[1]


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_the_original_weights_come_back(folder: Path) -> None:
    """They are freed during the fit, and in place when it is over."""
    model, streams, matrices = changed_model(folder, in_bits)
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    fit = output_fit._OutputFit(model, streams, matrices, with_vectors=False)
    with fit.without_originals():
        freed = [name for name, value in model.model.state_dict().items() if value.is_meta]
    assert sum(name.endswith("proj.weight") for name in freed) == 7 * len(model.layers)
    assert all("proj." in name for name in freed)  # not the norms, which still run
    assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())
    of_rounded = fit._changed.model.model.named_parameters()
    assert all(value.is_meta for name, value in of_rounded if ".layers.1." in name)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("what", ["all", "attention"])
def test_other_tensors_change_only_with_the_whole_model(what: str, folder: Path, tmp_path: Path) -> None:
    """Norms and biases beside `what` are those of the source."""
    (tmp_path / "text.txt").write_text(made_up_text(200), encoding="utf-8")
    files = {}
    for effort in ("low", "default"):
        out = tmp_path / effort
        compress(folder, out, Budget(bits=4), calibration=tmp_path / "text.txt", what=what, effort=effort)
        files[effort] = read_tensors(out)
    changed = {
        name
        for name, values in files["low"].items()
        if not np.array_equal(values.values, files["default"][name].values)
    }
    assert files["low"].keys() == files["default"].keys()
    assert any(name.endswith("_scale") for name in changed)
    vectors = {name for name in changed if any(word in name for word in VECTORS) and not name.endswith("_scale")}
    assert bool(vectors) == (what == "all")
