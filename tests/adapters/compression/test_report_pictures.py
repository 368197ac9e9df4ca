"""What the pictures and the summary of a report show: every point where its numbers are, every number once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tnlib_adapters import builtin_path, compress
from tnlib_adapters.compression.report.figures import error_curve, error_maps, spectra
from tnlib_adapters.compression.report.report import Report, RoundedReport, summarise

CURVE = {"kept": [0.1, 0.5, 0.9], "predicted": [0.5, 0.1, 0.01]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return compress(builtin_path(), tmp_path_factory.mktemp("pictures") / "out", keep=0.5)


@pytest.fixture(scope="module")
def on_text(plain: Report) -> Report:
    """As if it had been made for a text."""
    told = {
        "perplexity, before, on held-out text": 8.0,
        "perplexity, after, on held-out text": 9.0,
        "divergence (nats a token), on held-out text": 0.12,
        "divergence, predicted without the fit": 0.1,
    }
    measures = {"measure": "divergence (nats a token)", "predicted": 0.1, "measured": 0.12, "plain_measured": 1e-4}
    return replace(plain, **measures, curve=CURVE, quality=told)


def points(report: Report) -> dict[str, Any]:
    """Label of everything in the picture of the curve -> its line."""
    (ax,) = error_curve(report).axes
    return {str(line.get_label()).partition(":")[0]: line for line in ax.lines}


def test_the_curve_and_three_points_are_drawn_over_bytes(on_text: Report) -> None:
    lines, whole = points(on_text), 4e-6 * on_text.n_before  # MB of float32
    np.testing.assert_allclose(lines["predicted"].get_xydata(), np.column_stack(list(CURVE.values())) * [whole, 1])
    for name, x, y in (
        ("chosen", on_text.kept * whole, 0.1),
        ("measured", on_text.kept * whole, 0.12),
        (f"plain int8, {on_text.plain_bytes / 1e6:.2f} MB", on_text.plain_bytes / 1e6, 1e-4),
    ):
        np.testing.assert_allclose(lines[name].get_xydata(), [(x, y)])


def test_a_curve_over_bits(on_text: Report) -> None:
    curve = {"bits": [2.0, 4.0, 8.0], "predicted": [0.3, 0.1, 0.01]}
    lines = points(replace(on_text, curve=curve, average_bits=4.0))
    np.testing.assert_allclose(lines["predicted"].get_xdata(), np.array(curve["bits"]) / 8e6 * on_text.n_before)
    np.testing.assert_allclose(lines["measured"].get_xdata(), 4 / 8e6 * on_text.n_before)


@pytest.mark.parametrize("layout", ["factored", "dense"])
def test_plain_int8_without_an_error_is_a_line_at_its_bytes(layout: str, plain: Report) -> None:
    sizes = plain.bytes_before if layout == "dense" else plain.bytes_after
    lines = points(replace(plain, layout=layout, bytes_after=sizes))
    assert lines["plain int8"].get_xdata()[0] == pytest.approx(plain.plain_bytes / 1e6)
    assert lines["chosen"].get_xdata()[0] == pytest.approx(4e-6 * plain.n_after)


def test_errors_close_to_one_are_written_so(plain: Report) -> None:
    for error, said in ((0.9951, "1.0"), (0.994, ".99"), (0.004, ".00"), (1.26, "1.3"), (0.0, ".00")):
        heads = [replace(head, qk_error=error, ov_error=error) for head in plain.heads]
        written = {text.get_text() for ax in error_maps(replace(plain, heads=heads)).axes[:2] for text in ax.texts}
        assert written == {said}


@pytest.mark.parametrize("n_layers", [1, 2, 3, 4, 5, 6])
def test_every_panel_with_none_below_has_numbers(n_layers: int, plain: Report) -> None:
    heads = [replace(plain.heads[0], layer=layer) for layer in range(n_layers)]
    layers = [replace(plain.layers[0], layer=layer) for layer in range(n_layers)]
    figure = spectra(replace(plain, heads=heads, layers=layers))
    figure.canvas.draw()
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert len(shown) == n_layers
    for k, ax in enumerate(shown):
        labelled = any(label.get_visible() and label.get_text() for label in ax.get_xticklabels())
        assert labelled == (k + 3 >= n_layers) == bool(ax.get_xlabel())


def test_the_summary_says_everything_once(on_text: Report) -> None:
    lines = {name: (before, after) for name, before, after in summarise(on_text)}
    assert len(lines) == len(summarise(on_text))
    assert lines["numbers in the attention"] == (f"{on_text.n_before:,}", f"{on_text.n_after:,}")
    assert lines["perplexity, on held-out text"] == ("8.000", "9.000")
    assert [name for name in lines if "divergence" in name] == [
        f"divergence (nats a token), {what}" for what in ("predicted", "measured", "of plain int8")
    ]
    assert lines["divergence (nats a token), measured"] == ("", "0.12")


def test_the_summary_of_rounded_weights_counts_bits(plain: Report) -> None:
    rounded = [
        RoundedReport("layers.0", name, bits, None, 0, 9) for name, bits in zip("qkvo", (2, 3, 3, 8), strict=True)
    ]
    changed = replace(plain, rounded=rounded, n_after=plain.n_before, average_bits=4.25)
    lines = {name: (before, after) for name, before, after in summarise(changed)}
    assert lines["numbers in the attention"] == ("", f"{plain.n_before:,}")
    assert lines["stored bits per number"] == ("32.00", "4.25")
    assert lines["weights by bits"] == ("", "1 in 2 bits, 2 in 3 bits, 1 in 8 bits")
    forms = [RoundedReport("m", "", 3, 7, 0, 9), RoundedReport("n", "", 3, 7, 0, 9, is_corrected=True)]
    lines = {name: after for name, _, after in summarise(replace(changed, rounded=[*rounded, *forms]))}
    assert lines["weights by bits"].endswith(
        "1 as factors in 3 bits, 1 in 2 bits, 2 in 3 bits, 1 in 8 bits, 1 in 3 bits beside factors"
    )


def test_the_summary_of_a_dense_folder_tells_factors_apart(plain: Report) -> None:
    lines = {name: (before, after) for name, before, after in summarise(replace(plain, layout="dense"))}
    assert lines["numbers in the attention"] == (f"{plain.n_before:,}",) * 2
    assert lines["numbers in the factors"] == ("", f"{plain.n_after:,}")


def test_odd_names_of_measures_are_left_alone(plain: Report) -> None:
    lines = summarise(replace(plain, quality={"a, before": 1.0, "b, after": 2.0, "c": 3.0}))
    assert {("a, before", "", "1.000"), ("b, after", "", "2.000"), ("c", "", "3.000")} <= set(lines)


def test_nothing_is_drawn_of_what_is_not_known(plain: Report) -> None:
    found = points(replace(plain, predicted=None, measured=None))
    assert set(found) == {"predicted", "plain int8"}
