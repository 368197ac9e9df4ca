"""What notebooks show of checkpoints, frozen models and attributions, and their tables as data frames."""

from __future__ import annotations

import base64
import io
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from tnlib_adapters import Checkpoint, builtin_path, circuits

VIEWS = {
    "checkpoint": lambda m: m,
    "frozen model": lambda m: tnlib_adapters.freeze(m, np.arange(12)),
    "logit": lambda m: circuits.logit_contributions(tnlib_adapters.freeze(m, np.arange(12)), 5),
    "pattern scores": lambda m: circuits.repeat_scores(m, length=10),
}
TOKENS = np.tile(np.arange(2, 10), (2, 2))
SECOND = np.broadcast_to(np.arange(16) > 8, TOKENS.shape)


def first_layer(checkpoint: Checkpoint) -> circuits.OpenLayer:
    layer = checkpoint.attention(0)
    return circuits.OpenLayer(layer, circuits.split_stream(checkpoint, TOKENS[0], layer=0))


VIEWS |= {
    "scores": lambda m: circuits.qk_attributions(m, TOKENS[0]),
    "score": lambda m: circuits.qk_attributions(m, TOKENS[0]).score(0, 1, query=5, key=3),
    "weights": lambda m: first_layer(m).pattern_terms(),
    "edges": lambda m: circuits.edge_effects(m, TOKENS, SECOND, n_measured=3),
    "circuit": lambda m: circuits.find_circuit(m, TOKENS, SECOND, loss_increase=0.5, by="integrated"),
    "copying": lambda m: circuits.copying_scores(m),
    "orders": lambda m: circuits.path_orders(VIEWS["logit"](m)),
    "order losses": lambda m: circuits.order_losses(tnlib_adapters.freeze(m, TOKENS[0])),
    "paths": lambda m: circuits.strongest_paths(VIEWS["logit"](m), 20),
}
FRAMES = {
    "scores": (VIEWS["scores"], ["layer", "head", "query", "key", "contribution"]),
    "score": (VIEWS["score"], ["query", "key", "contribution"]),
    "weights": (VIEWS["weights"], ["term", "change", "bound"]),
    "edges": (VIEWS["edges"], ["writer", "reader", "first_order", "integrated", "measured"]),
    "circuit": (VIEWS["circuit"], ["term", "is_kept", "effect", "loss"]),
    "logit": (VIEWS["logit"], ["component", "direct", "through"]),
    "pattern scores": (VIEWS["pattern scores"], ["layer", "head", "previous", "duplicate", "induction"]),
    "composition": (
        lambda m: circuits.compositions(m, "V"),
        ["kind", "writer", "reader", "score", "chance", "multiple"],
    ),
}


def parsed(html: str) -> ET.Element:
    return ET.fromstring(re.sub(r"(<(?:img|br)[^>]*)>", r"\1/>", html))


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_well_formed_and_small(name: str, model: Checkpoint, llama: Checkpoint) -> None:
    for checkpoint in (model, llama):
        html = VIEWS[name](checkpoint)._repr_html_()
        parsed(html)
        assert "<svg" in html or "<img" in html
        assert len(html) < 100_000
        assert "<script" not in html


def test_views_have_the_numbers(model: Checkpoint, llama: Checkpoint) -> None:
    assert "8 of 16, 2 key and value heads" in llama._repr_html_()
    assert [len(path.split("M")) - 1 for path in re.findall(r' d="([^"]*)"', llama._repr_html_())] == [16, 16]
    found = circuits.compositions(model, "K")
    assert "<td>0.3</td><td>1.1</td><td>0.254</td>" in found._repr_html_()
    parsed(found._repr_html_())
    logit = VIEWS["logit"](llama)
    name = logit.names[int(np.abs(logit.direct).argmax())]
    assert f'<td class="text">{name}</td><td>{logit.direct[logit.names.index(name)]:.3f}</td>' in logit._repr_html_()


AGREES = {
    "scores": lambda frame, value: (
        len(frame) == sum(layer.pairs.size for layer in value.layers)
        and max(zip(frame.contribution.abs(), frame["query"], frame["key"], strict=True))[1:] == value.top(1)[0][1:3]
    ),
    "score": lambda frame, value: np.isclose(frame.contribution.sum() + value.offset, value.total),
    "weights": lambda frame, value: np.isclose(frame.change[0], np.abs(value.terms[0]).sum(axis=-1).mean()),
    "edges": lambda frame, value: tuple(frame.writer + " -> " + frame.reader) == value.names,
    "circuit": lambda frame, value: (
        tuple(frame.term[frame.is_kept]) == value.kept and frame.effect.isna().sum() == len(value.removed)
    ),
}


def test_an_empty_circuit_is_shown(model: Checkpoint) -> None:
    found = circuits.find_circuit(model, TOKENS, SECOND, loss_increase=1e6)
    assert found.kept == ()
    parsed(found._repr_html_())


def test_a_long_text_has_a_small_picture(llama: Checkpoint) -> None:
    image = pytest.importorskip("matplotlib.image")
    frozen = tnlib_adapters.freeze(llama, np.random.default_rng(0).integers(0, 1024, 200))
    (data,) = re.findall(r'base64,([^"]+)', frozen._repr_html_())
    pixels = image.imread(io.BytesIO(base64.b64decode(data)), format="png")
    rows, margin = 40, 2  # maxima over 5 x 5 positions
    assert pixels.shape[:2] == (4 * (rows + margin), 8 * (rows + margin))
    attentions = [heads for block in frozen.blocks for heads in block.heads if heads is not None]
    blocks = attentions[2].patterns[5].reshape(rows, 5, rows, 5).max(axis=(1, 3))
    at = 2 * (rows + margin), 5 * (rows + margin)
    shown = 1 - pixels[at[0] : at[0] + rows, at[1] : at[1] + rows, 0]
    assert np.corrcoef(shown.ravel(), blocks.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("name", FRAMES)
def test_tables_are_data_frames(name: str, llama: Checkpoint) -> None:
    pytest.importorskip("pandas")
    make, columns = FRAMES[name]
    value = make(llama)
    frame = value.to_frame()
    assert list(frame.columns) == columns
    if name == "logit":
        assert frame.direct.sum() == pytest.approx(value.direct.sum())
    if name == "composition":
        assert len(frame) == np.isfinite(value.scores).sum()
        assert frame.multiple.is_monotonic_decreasing
    if name == "pattern scores":
        assert len(frame) == 32
    if name in AGREES:
        assert AGREES[name](frame, value)


def test_the_induction_table_is_a_data_frame(model: Checkpoint) -> None:
    pytest.importorskip("pandas")
    found = circuits.find_induction(model, n=4)
    assert found.to_frame().set_index(["layer", "head"]).lost[0, 3] == found.lost[0, 3]


@pytest.mark.slow
def test_the_page_is_figures_and_data_frames(model: Checkpoint, tmp_path: Path) -> None:
    found = tnlib_adapters.inspect(builtin_path(), tmp_path / "out")
    figures = found.figures()
    assert {"composition K", "effective ranks", "head scores", "patterns of layer 1"} <= set(figures)
    assert all(figure.axes for figure in figures.values())
    pytest.importorskip("pandas")
    frames = found.frames()
    assert set(frames) >= {"composition K", "overlaps O with K", "head scores", "contributions", "gauges"}
    assert len(frames["contributions"]) == 8
    assert list(frames["gauges"].n_free) == [report.n_free for report in found.gauges]
    overlaps = frames["overlaps O with K"]
    assert overlaps.overlap.is_monotonic_decreasing
    assert len(overlaps) == 8 * 7


def test_a_missing_pandas_is_named(model: Checkpoint, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"Compositions.to_frame needs pandas.*pip install pandas"):
        circuits.compositions(model, "K").to_frame()
