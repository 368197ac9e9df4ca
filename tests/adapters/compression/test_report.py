"""The report of a compression as data, page, pictures and summary: every number where it is, and once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import builtin_copy, change_tensors
from compressed_folders import attention_tensors, dense_layers, read_config, read_tensors, relative, tail
from slow_cases import mostly_slow
from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.compression.compressed_part import compressed_weights, stored_bytes
from tnlib_adapters.compression.methods.method_table import METHODS
from tnlib_adapters.compression.operator_errors import compare_layer
from tnlib_adapters.compression.report import Report, megabytes, summarise
from tnlib_adapters.compression.report_page import error_curve

BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("name", mostly_slow(["builtin", "bert_masked", "gpt2_lm"], ["gpt2_lm"]))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("without_pictures")
def test_errors_are_those_of_the_operators_multiplied_out(
    method: str, name: str, folder_of: Any, tmp_path: Path
) -> None:
    source = folder_of(name)
    dense = compress(source, tmp_path / "dense", Budget(keep=0.5), method=method, layout="dense", what="attention")
    heads = iter(dense.heads)
    layers = zip(dense_layers(source), dense_layers(tmp_path / "dense"), dense.layers, strict=True)
    for number, (before, after, layer) in enumerate(layers):
        sums = np.zeros((2, 2))
        for head, one in zip(range(before.n_heads), heads, strict=False):
            assert (one.layer, one.head) == (number, head)
            for kind, (error, spectrum) in enumerate(
                [(one.qk_error, one.qk_spectrum), (one.ov_error, one.ov_spectrum)]
            ):
                a, b = before.operators()[kind][head], after.operators()[kind][head]
                assert error == pytest.approx(relative(a, b), rel=1e-6)
                s = np.linalg.svd(a, compute_uv=False)[: len(spectrum)]
                np.testing.assert_allclose(spectrum, s, rtol=1e-6, atol=1e-7 * s[0])
                sums[kind] += np.sum((a - b) ** 2), np.sum(a**2)
        whole = np.sqrt(sums[:, 0] / sums[:, 1])
        assert (layer.qk_error, layer.ov_error) == pytest.approx(tuple(whole), rel=1e-6)
        mine = [max(h.qk_error, h.ov_error) for h in dense.heads if h.layer == number]
        assert layer.worst == max(mine)

    factored = compress(source, tmp_path / "factored", Budget(keep=0.5), method=method, what="attention")
    for a, b in zip(factored.heads, dense.heads, strict=True):
        assert (a.qk_error, a.ov_error) == pytest.approx((b.qk_error, b.ov_error), rel=1e-5)


@pytest.mark.usefixtures("without_pictures")
def test_heads_err_by_the_tail_of_their_spectrum(folder_of: Any, tmp_path: Path) -> None:
    """Nothing of that rank is closer: the error that is written is the one of Eckart and Young."""
    for name in ("builtin", "gpt2"):
        report = compress(folder_of(name), tmp_path / name, Budget(keep=0.5), what="attention")
        for head in report.heads:
            assert head.qk_kept is not None
            assert head.ov_kept is not None
            assert head.qk_error == pytest.approx(tail(np.array(head.qk_spectrum), head.qk_kept), rel=1e-4, abs=1e-6)
            assert head.ov_error == pytest.approx(tail(np.array(head.ov_spectrum), head.ov_kept), rel=1e-4, abs=1e-6)
        assert len({head.qk_kept for head in report.heads}) > 1, "every head has the same rank"


@pytest.mark.usefixtures("without_pictures")
def test_ranks_are_per_head_only_where_factors_are(tmp_path: Path) -> None:
    report = compress(builtin_path(), tmp_path / "out", Budget(keep=0.5), method="matrix", what="attention")
    assert {(head.qk_kept, head.ov_kept) for head in report.heads} == {(None, None)}


def attention(seed: int, scale: float = 1.0) -> Attention:
    rng = np.random.default_rng(seed)
    return Attention(
        *(scale * rng.standard_normal((2, 5, 3)) for _ in range(3)),
        scale * rng.standard_normal((2, 3, 5)),
        scale=0.3,
        b_Q=scale * rng.standard_normal((2, 3)),
    )


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_tiny_and_huge_weights_err_alike(scale: float) -> None:
    """Products of such float32 leave their range, their errors do not."""
    small = Attention(
        **{k: v.astype("f4") if isinstance(v, np.ndarray) else v for k, v in vars(attention(0, scale)).items()}
    )
    other = Attention(
        **{k: v.astype("f4") if isinstance(v, np.ndarray) else v for k, v in vars(attention(1, scale)).items()}
    )
    heads, qk, ov = compare_layer(7, small, other)
    ours, same_qk, same_ov = compare_layer(7, attention(0), attention(1))
    assert (qk, ov) == pytest.approx((same_qk, same_ov), rel=1e-5)
    for a, b in zip(heads, ours, strict=True):
        assert (a.qk_error, a.ov_error) == pytest.approx((b.qk_error, b.ov_error), rel=1e-5)
        assert a.layer == 7


def test_no_error_at_all() -> None:
    heads, qk, ov = compare_layer(0, attention(0), attention(0))
    assert max(qk, ov, *(max(h.qk_error, h.ov_error) for h in heads)) < 1e-14
    zero = attention(0, 0.0)
    heads, qk, ov = compare_layer(0, zero, zero)
    assert (qk, ov) == (0, 0)
    assert all(h.qk_error == h.ov_error == 0 for h in heads)


# ----------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize("layout", ["factored", "dense"])
@pytest.mark.parametrize("name", mostly_slow(["builtin", "bert_masked", "gpt2_lm"], ["gpt2_lm"]))
@pytest.mark.usefixtures("without_pictures")
def test_numbers_and_bytes_are_those_of_the_files(name: str, layout: str, folder_of: Any, tmp_path: Path) -> None:
    source, out = folder_of(name), tmp_path / "out"
    report = compress(source, out, Budget(keep=0.5), layout=layout, what="attention")
    weights = compressed_weights(open_checkpoint(source), "attention")
    for folder, found in ((source, report.bytes_before), (out, report.bytes_after)):
        inside, everything = attention_tensors(folder), read_tensors(folder)
        sizes = {tensor: t.values.size * BYTES[t.dtype] for tensor, t in everything.items()}
        assert found["attention"] == sum(sizes[tensor] for tensor in inside)
        assert sum(found.values()) == sum(sizes.values())
        assert stored_bytes(open_checkpoint(folder), weights)[0] == found
        n_other = sum(t.values.size for tensor, t in everything.items() if tensor not in inside)
        assert report.n_other == n_other
    stored = sum(t.values.size for t in attention_tensors(out).values())
    assert report.n_stored == stored
    assert (stored == report.n_after) == (layout == "factored")
    assert sum(layer.n_after for layer in report.layers) == report.n_after
    assert sum(layer.n_before for layer in report.layers) == report.n_before
    assert report.kept == report.n_after / report.n_before
    assert report.seconds > 0
    assert report.peak_memory > 10**7


# ------------------------------------------------------------------------------------------------------------- page


@pytest.mark.slow
@pytest.mark.parametrize("method", ["heads", "cp"])
def test_a_page_of_an_odd_model(method: str, tmp_path: Path) -> None:
    """A layer of zeros: nothing to divide by, and still a page without warnings."""
    source = builtin_copy(tmp_path / "in")
    change_tensors(source, lambda t: [t[name].fill(0) for name in t if "layers.1.attention" in name])
    report = compress(source, tmp_path / "out", Budget(keep=0.5), method=method, what="attention")
    assert report.layers[1].qk_error == 0
    assert read_config(tmp_path / "out")["quantization_config"]["method"] == method
    pictures = 0 if method == "cp" else 1  # CP has no curve
    assert (tmp_path / "out/tnlib_report.html").read_text().count("<svg") == pictures


CURVE = {"kept": [0.1, 0.5, 0.9], "predicted": [0.5, 0.1, 0.01]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return compress(builtin_path(), tmp_path_factory.mktemp("pictures") / "out", Budget(keep=0.5), what="attention")


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


@pytest.mark.slow
def test_the_curve_and_three_points_are_drawn_over_bytes(on_text: Report) -> None:
    lines, whole = points(on_text), 4e-6 * on_text.n_before  # MB of float32
    np.testing.assert_allclose(lines["predicted"].get_xydata(), np.column_stack(list(CURVE.values())) * [whole, 1])
    for name, x, y in (
        ("chosen", on_text.kept * whole, 0.1),
        ("measured", on_text.kept * whole, 0.12),
        (f"plain int8, {megabytes(on_text.plain_bytes)}", on_text.plain_bytes / 1e6, 1e-4),
    ):
        np.testing.assert_allclose(lines[name].get_xydata(), [(x, y)])


@pytest.mark.slow
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


def test_the_summary_says_everything_once(on_text: Report) -> None:
    lines = {name: (before, after) for name, before, after in summarise(on_text)}
    assert len(lines) == len(summarise(on_text))
    assert lines["parameters in the attention"] == (f"{on_text.n_before:,}", f"{on_text.n_after:,}")
    assert lines["perplexity, on held-out text"] == ("8.000", "9.000")
    assert [name for name in lines if "divergence" in name] == [
        f"divergence (nats a token), {what}" for what in ("predicted", "measured", "of plain int8")
    ]
    assert lines["divergence (nats a token), measured"] == ("", "0.12")


def test_the_summary_of_a_dense_folder_tells_factors_apart(plain: Report) -> None:
    lines = {name: (before, after) for name, before, after in summarise(replace(plain, layout="dense"))}
    assert lines["parameters in the attention"] == (f"{plain.n_before:,}",) * 2
    assert lines["parameters in the factors"] == ("", f"{plain.n_after:,}")


def test_nothing_is_drawn_of_what_is_not_known(plain: Report) -> None:
    found = points(replace(plain, predicted=None, measured=None))
    assert set(found) == {"predicted", "plain int8"}
