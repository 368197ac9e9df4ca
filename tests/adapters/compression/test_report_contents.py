"""The report of a compression: what it says is what lies on the disk, as data and as a page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import builtin_copy, random_folder
from compressed_folders import by_options, dense_layers, relative
from html_pages import Page, check_page, pictures
from tnlib_adapters import Budget, compress, open_checkpoint
from tnlib_adapters.compression.report import HeadReport, LayerReport, Report
from tnlib_adapters.compression.report_page import write_page

REPORT, PAGE = "tnlib_report.json", "tnlib_report.html"


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Report]:
    """The built-in model compressed by heads: where it came from, where it is, and the report."""
    base = tmp_path_factory.mktemp("report")
    source = builtin_copy(base / "in")
    (source / "pytorch_model.bin").write_bytes(b"pickled")
    return source, base / "out", compress(source, base / "out", Budget(keep=0.4), layout="dense", what="attention")


def test_it_reads_back_as_it_was(compressed: Any) -> None:
    _, out, report = compressed
    found = json.loads((out / REPORT).read_text())
    assert found == json.loads(report.to_json())
    assert found.keys() == {field.name for field in dataclasses.fields(Report)}
    layers = [LayerReport(**one) for one in found.pop("layers")]
    heads = [HeadReport(**one) for one in found.pop("heads")]
    assert Report(**found, layers=layers, heads=heads) == report


CARDS = {
    "none": (None, b"", b""),
    "without front matter": (b"# Card\n", b"", b"# Card\n"),
    "front matter": (b"---\nlicense: mit\n---\n\n# Card\n", b"---\nlicense: mit\n---\n\n", b"# Card\n"),
    "front matter alone": (b"---\nlicense: mit\n---", b"---\nlicense: mit\n---\n\n", b""),
    "not closed": (b"---\nlicense: mit\n\n# Card\n", b"", b"---\nlicense: mit\n\n# Card\n"),
    "of Windows": (b"\xef\xbb\xbf---\r\na: 1\r\n---\r\nCard\r\n", b"\xef\xbb\xbf---\r\na: 1\r\n---\n\n", b"Card\r\n"),
    "no UTF-8": (b"caf\xe9\n", b"", b"caf\xe9\n"),
}


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("case", CARDS)
def test_the_readme_says_how_the_folder_loads_above_the_model_card(case: str, tmp_path: Path) -> None:
    card, front, body = CARDS[case]
    source, out = builtin_copy(tmp_path / "in"), tmp_path / "out"
    (source / "README.md").unlink() if card is None else (source / "README.md").write_bytes(card)
    report = compress(source, out, Budget(keep=0.5), what="attention")
    readme = (out / "README.md").read_bytes()
    assert readme.startswith(front + b"> Compressed by tnlib")
    lines = readme[len(front) :].split(b"\n")
    assert [line.startswith(b"> ") for line in lines[:4]] == [True, True, True, False]
    assert lines[2].decode() == f"> `{report.load}`"
    assert readme.endswith(b"`\n\n" + body if body else b"`\n")


@pytest.mark.usefixtures("without_pictures")
def test_the_readme_of_a_dense_result_is_replaced_when_it_is_compressed_again(tmp_path: Path) -> None:
    first = compress(
        builtin_copy(tmp_path / "in"), tmp_path / "dense", **by_options(keep=0.5, method="matrix", layout="dense")
    )
    second = compress(tmp_path / "dense", tmp_path / "out", Budget(keep=0.4), what="attention")
    assert (first.method, second.method) == ("matrix", "heads")
    readme = (tmp_path / "out" / "README.md").read_text()
    assert readme.count("> ") == 3
    assert f"{second.kept:.4f}" in readme
    assert readme.endswith((tmp_path / "in" / "README.md").read_text())


LOADED = {"bert": "BertModel", "gpt2_lm": "GPT2LMHeadModel", "t5_encoder": "T5EncoderModel"}


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("layout", ["factored", "dense"])
@pytest.mark.parametrize("name", LOADED)
def test_the_code_in_the_report_loads_the_folder(name: str, layout: str, folders: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = compress(folders[name], tmp_path / "out", Budget(keep=0.5), layout=layout, what="attention")
    scope: dict[str, Any] = {"folder": str(tmp_path / "out")}
    exec(report.load, scope)
    assert report.load.startswith("import transformers;") == (layout == "dense")
    assert type(scope["model"]).__name__ == LOADED[name]
    assert scope["model"].config.model_type == report.model_type


def test_no_number_in_it_is_beyond_json(compressed: Any) -> None:
    def fail(constant: str) -> None:
        raise AssertionError(constant)

    json.loads((compressed[1] / REPORT).read_text(), parse_constant=fail)


def test_what_was_kept_of_a_head_is_its_rank(compressed: Any) -> None:
    _, out, report = compressed
    layers = dense_layers(out)
    for one in report.heads:
        for kind, said in enumerate((one.qk_kept, one.ov_kept)):
            operator = layers[one.layer].operators()[kind][one.head]
            assert np.linalg.matrix_rank(operator, rtol=1e-5) == said
    assert len({one.qk_kept for one in report.heads}) > 1


@pytest.mark.usefixtures("without_pictures")
def test_heads_have_no_ranks_of_their_own_in_other_methods(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "in", d=16, n_heads=4, dtype="BF16")
    report = compress(source, tmp_path / "out", Budget(keep=0.59), method="matrix", what="attention")
    assert {one.qk_kept for one in report.heads} == {one.ov_kept for one in report.heads} == {None}
    assert report.quality == {}
    assert report.bytes_after["attention"] == 2 * report.n_after
    for one in report.layers:
        assert 0 < one.qk_error < 1
        assert 0 < one.ov_error < 1
    checkpoint = open_checkpoint(tmp_path / "out")
    for one in report.heads:
        old, new = (open_checkpoint(folder).attention(one.layer) for folder in (source, checkpoint.folder.path))
        a, b = (x.qk(one.head).full().astype(float) for x in (old, new))
        assert one.qk_error == pytest.approx(relative(a, b), rel=1e-4)


# --------------------------------------------------------------------------------------------------------- the page


def test_the_page_holds_one_picture_and_needs_nothing_else(compressed: Any) -> None:
    page = (compressed[1] / PAGE).read_text()
    found = check_page(page)
    assert [tag for tag, _ in found.tags].count("svg") == len(pictures(page)) == 1
    assert "img" not in {tag for tag, _ in found.tags}
    assert all(len(list(picture.iter())) > 50 for picture in pictures(page))


def test_the_page_states_the_numbers(compressed: Any) -> None:
    _, _, report = compressed
    text = Page((compressed[1] / PAGE).read_text()).text
    for wanted in (f"{report.n_before:,}", f"{report.n_after:,}", f"{report.kept:.4f}", "heads", "pytorch_model.bin"):
        assert wanted in text
    assert report.source in text
    for name, value in report.quality.items():
        assert name.rpartition(",")[0] in text
        assert f"{value:.3f}" in text


NASTY = "<script>alert('&')</script>\"<b>"


@pytest.mark.slow
def test_names_are_escaped(compressed: Any, tmp_path: Path) -> None:
    report = dataclasses.replace(
        compressed[2],
        source=f"/models/{NASTY.replace('/', '')}",
        left_out=[NASTY],
        quality={f"{NASTY}, before": 1.0, f"{NASTY}, after": 2.0},
    )
    write_page(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    found = Page(page)
    assert not {"script", "b"} & {tag for tag, _ in found.tags}
    assert NASTY in found.text
    assert NASTY.replace("/", "") in found.text


@pytest.mark.slow
def test_a_folder_with_markup_in_its_name(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "<i>&amp;", "gpt2", d=16, n_heads=4)
    compress(source, tmp_path / "out", Budget(keep=0.5), what="attention")
    found = Page((tmp_path / "out" / PAGE).read_text())
    assert "i" not in {tag for tag, _ in found.tags}
    assert "<i>&amp;" in found.text


def head(layer: int, index: int, error: float = 0.0, spectrum: tuple[float, ...] = (1.0, 0.5), kept: Any = None) -> Any:
    return HeadReport(layer, index, error, error, list(spectrum), list(spectrum), kept, kept)


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [1, 4])
@pytest.mark.parametrize(
    "values",
    [{}, {"error": 1.7}, {"spectrum": (0.0, 0.0)}, {"kept": 0}, {"kept": 2}, {"spectrum": (1e-30,), "kept": 1}],
)
def test_odd_reports_have_a_page(n_layers: int, values: dict[str, Any], tmp_path: Path, compressed: Any) -> None:
    report = dataclasses.replace(
        compressed[2],
        source="/",
        layers=[LayerReport(layer, 0.0, 0.0, worst=0.0, n_before=10, n_after=0) for layer in range(n_layers)],
        heads=[head(layer, index, **values) for layer in range(n_layers) for index in range(2)],
        n_other=0,
        bytes_before={"attention": 40, "other": 0},
        bytes_after={"attention": 0, "other": 0},
        quality={},
    )
    write_page(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "nan" not in Page(page).text


@pytest.mark.usefixtures("without_pictures")
def test_the_same_model_is_reported_without_error(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "in", d=16, n_heads=4)
    report = compress(source, tmp_path / "out", Budget(keep=1.0), method="matrix", layout="dense", what="attention")
    assert max(max(one.qk_error, one.ov_error) for one in [*report.layers, *report.heads]) < 1e-12
    assert report.n_after == report.n_before
    assert report.bytes_after == report.bytes_before
