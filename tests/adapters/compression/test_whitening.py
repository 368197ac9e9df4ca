"""Plain methods whitened by a text: the best of their rank on the inputs, and models that reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import mostly_slow

pytest.importorskip("transformers")
pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import tnlib_adapters
import tnlib_adapters.transformers_plugin  # registers the layout
from compressed_folders import by_options
from oracles import refused
from tnlib_adapters import Budget, evaluate, open_checkpoint
from tnlib_adapters.compression.calibration.whitening import Whitened, inputs_of_text
from tnlib_adapters.compression.methods.components import Inputs
from tnlib_adapters.compression.methods.factorise import factorise_layer
from tnlib_adapters.compression.methods.table import METHODS
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.projections import Projections, Sizes
from transformers_models import made_up_text

from tnlib import ArgumentError

pytestmark = pytest.mark.usefixtures("without_pictures")
NAMES = ("bert", "gpt2_lm", "llama", "llama_biases")
D, HEADS, DH, N = 12, 3, 4, 400
SIZES = Sizes(1, HEADS, D)


def layer(seed: int = 0) -> tuple[Projections, Inputs, np.ndarray, np.ndarray]:
    """A layer, and inputs of it that lie mostly in a few directions, with a mean."""
    rng = np.random.default_rng(seed)
    weights = {name: rng.standard_normal((D, D)) for name in "qkvo"}
    biases = {name: rng.standard_normal(D) for name in "qkvo"}
    x, y = (
        rng.standard_normal((N, D)) @ (rng.standard_normal((D, D)) * 2.0 ** -np.arange(D)[:, None])
        + rng.standard_normal(D)
        for _ in range(2)
    )
    wide = np.concatenate([x, np.ones((N, 1))], axis=1)
    return Projections(weights, biases), Inputs(wide.T @ wide, y.T @ y), x, y


def errors(old: Projections, new: Projections, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Squared relative errors on the inputs of every weight, and of the scores and mixed outputs of every head."""
    found = {
        name: np.linalg.norm((y if name == "o" else x) @ (old.weights[name] - new.weights[name])) ** 2
        for name in "qkvo"
    }
    for head in range(HEADS):
        own = slice(head * DH, (head + 1) * DH)

        def scores(p: Projections, own: slice = own) -> np.ndarray:
            q, k = (x @ p.weights[name][:, own] + p.biases[name][own] for name in "qk")
            return q @ k.T

        def mixed(p: Projections, own: slice = own) -> np.ndarray:
            return (x @ p.weights["v"][:, own] + p.biases["v"][own]) @ p.weights["o"][own]

        for kind, of in (("qk", scores), ("vo", mixed)):
            found[f"{kind}{head}"] = (np.linalg.norm(of(old) - of(new)) / np.linalg.norm(of(old))) ** 2
    for name in "qkvo":
        found[name] /= np.linalg.norm((y if name == "o" else x) @ old.weights[name]) ** 2
    return found


def at(method: Any, old: Projections, rank: int, sizes: Sizes = SIZES) -> Projections:
    options = [min(rank, len(curve.costs) - 2) for curve in method.curves]
    return old.updated(expand(method.matrices(options), sizes))


def test_matrices_err_least_on_the_inputs() -> None:
    """Eckart and Young after whitening, and what the curve says is what the inputs show."""
    old, inputs, x, y = layer()
    white, plain = Whitened("matrix", old, SIZES, inputs, turned=False), factorise_layer(METHODS["matrix"], old, SIZES)
    for option in (0, 2, 4):
        on_white, on_plain = (errors(old, at(one, old, option), x, y) for one in (white, plain))
        for name, curve in zip("qkvo", white.curves, strict=True):
            assert on_white[name] == pytest.approx(curve.errors[min(option, len(curve.costs) - 2)], rel=1e-6)
            assert on_white[name] <= on_plain[name]
        for name in "qkvo":
            read = y if name == "o" else x
            best = np.linalg.svd(read @ old.weights[name], compute_uv=False)
            rank = min(option, len(white.curves[0].costs) - 2) + 1
            assert on_white[name] == pytest.approx(np.sum(best[rank:] ** 2) / np.sum(best**2), rel=1e-6)


def test_heads_err_least_on_pairs_of_inputs() -> None:
    old, inputs, x, y = layer(1)
    white, plain = Whitened("heads", old, SIZES, inputs, turned=False), factorise_layer(METHODS["heads"], old, SIZES)
    names = [f"{kind}{head}" for kind in ("qk", "vo") for head in range(HEADS)]
    for rank in (1, 2, 3):
        on_white, on_plain = (errors(old, at(one, old, rank), x, y) for one in (white, plain))
        for name, curve in zip(names, white.curves, strict=True):
            assert on_white[name] == pytest.approx(curve.errors[rank], rel=1e-6)
            assert on_white[name] <= on_plain[name]


@pytest.mark.parametrize("method", ["matrix", "heads", "tucker"])
def test_nothing_truncated_is_nothing_changed(method: str) -> None:
    old, inputs, _, _ = layer(2)
    whole = Whitened(method, old, SIZES, inputs, turned=False)
    new = old.updated(expand(whole.matrices([len(curve.costs) - 1 for curve in whole.curves]), SIZES))
    for head in range(HEADS):
        own = slice(head * DH, (head + 1) * DH)
        for one, two in (("q", "k"), ("v", "o")):
            a, b = (p.weights[one][:, own] @ (p.weights[two][own] if two == "o" else p.weights[two][:, own].T)
                    for p in (old, new))  # fmt: skip
            np.testing.assert_allclose(a, b, atol=1e-8 * np.abs(a).max())


@pytest.mark.parametrize("method", ["matrix", "heads", "tucker"])
def test_inputs_that_never_leave_a_plane(method: str) -> None:
    """A singular moment is the rule: a bias, a norm, few tokens."""
    old, inputs, x, y = layer(3)
    flat = x.copy()
    flat[:, 5:] = 0
    wide = np.concatenate([flat, np.ones((N, 1))], axis=1)
    white = Whitened(method, old, SIZES, Inputs(wide.T @ wide, inputs.y * 0), turned=False)
    new = at(white, old, 20 if method == "tucker" else 3)  # its options are many, and grow slowly
    assert all(np.isfinite(w).all() for w in new.weights.values())
    names = [f"qk{head}" for head in range(HEADS)] if method == "heads" else "qk"
    assert max(errors(old, new, flat, y)[name] for name in names) < 0.5


@pytest.mark.parametrize(
    ("method", "name"),
    mostly_slow(
        [(method, name) for method in ("matrix", "heads", "ttm", "tucker") for name in NAMES],
        [("heads", "gpt2_lm"), ("heads", "llama"), ("ttm", "bert")],
    ),
)
def test_a_folder_reloads_and_lies_nearer_than_the_plain_one(
    method: str, name: str, folders: Any, text: Path, tmp_path: Path
) -> None:
    report = tnlib_adapters.compress(
        folders[name], tmp_path / "out", Budget(keep=0.5), calibration=text, method=method, what="attention"
    )
    assert 0.49 <= report.kept <= 0.5
    assert report.predicted is None
    assert report.measured is not None
    tnlib_adapters.compress(folders[name], tmp_path / "plain", Budget(keep=0.5), method=method, what="attention")
    found, other = (evaluate(folders[name], tmp_path / out, text).error for out in ("out", "plain"))
    assert found < 1.05 * other  # weights at random: there is little to see
    assert open_checkpoint(tmp_path / "out").attention(0).n_heads > 0


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_those_that_the_model_reads(name: str, folders: Any) -> None:
    checkpoint = open_checkpoint(folders[name])
    found = inputs_of_text(checkpoint, made_up_text())
    assert found.keys() == {f"{k}.{part}" for k in range(checkpoint.n_layers) for part in "xy"}
    for x in (found[f"{k}.x"] for k in range(checkpoint.n_layers)):
        total = x[-1, -1]  # of the weights of all tokens, whose input 1 is the last
        assert total > 0
        assert np.all(np.linalg.eigvalsh(x) > -1e-6 * np.trace(x))
        # behind a norm every token has a length of about the root of the width
        assert 0.1 < np.trace(x[:-1, :-1]) / total / checkpoint.sizes.d_model < 10


def test_tables_are_read_as_often_as_their_words_come(folders: Any) -> None:
    checkpoint = open_checkpoint(folders["bert"])
    found = inputs_of_text(checkpoint, made_up_text(), what="all")
    table = found[checkpoint.architecture.embeddings[0]]
    assert table.shape == checkpoint.read(f"{checkpoint.architecture.embeddings[0]}.weight").shape[:1]
    assert table[2] == 120  # every line starts with [BOS]
    assert not table[[0, 3]].any()  # nothing is read beyond the end of a line


def test_what_is_off_is_refused(folders: Any, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    short = tmp_path / "short"
    short.write_text("w1 w2 w3\n")
    with refused(ArgumentError, "too few; add text"):
        tnlib_adapters.compress(folders["bert"], out, **by_options(keep=0.5, calibrate=short, method="heads"))
    with refused(ArgumentError, "method 'calibrated' needs a text"):
        tnlib_adapters.compress(folders["bert"], out, Budget(keep=0.5), method="calibrated", what="attention")
    for method in ("heads", "ttm", "tucker"):
        with refused(ArgumentError, f"max_error cannot be met by method {method!r} with a text"):
            tnlib_adapters.compress(folders["bert"], out, **by_options(max_error=0.1, calibrate=text, method=method))
    known = "'calibrated', 'quantized', 'heads', 'matrix', 'ttm', 'tucker'"
    with refused(ArgumentError, f"calibration works with method {known}, got 'cp'"):
        tnlib_adapters.compress(folders["bert"], out, Budget(keep=0.5), calibration=text, method="cp", what="attention")
    assert not out.exists()
