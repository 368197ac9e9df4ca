"""tnlib inspect: a page that needs nothing else, with every section, and numbers that are those of the model."""

from __future__ import annotations

import dataclasses
import html
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from checkpoint_folders import builtin_copy
from command_line import run_command
from html_pages import check_page, pictures
from oracles import normal
from slow_cases import mostly_slow
from tnlib_adapters import Attention, builtin_path, circuits, inspect, open_checkpoint
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.circuits.heads.singular_vectors import effective_rank
from tnlib_adapters.compression.progress import quiet
from tnlib_adapters.factors.projections import Sizes
from tnlib_adapters.inspection.findings import findings
from tnlib_adapters.inspection.head_measurements import gauge_report
from tnlib_adapters.inspection.inspect import page_of
from tnlib_adapters.inspection.measure import TokenSequence, n_shown, read_tokens
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

import tnlib

PAGE = "inspect.html"
SECTIONS = ("predictions", "heads", "patterns", "composition", "spectra", "gauge", "diagrams")
SENTENCE = "def read(self, path):\n    with open(path) as file:\n        return file.read()"


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return inspect(builtin_path(), tmp_path_factory.mktemp("inspect") / "out")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same without its page, which takes nearly all of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["tnlib_adapters.inspection.inspect"], "page_of", lambda *_: "")
        return inspect(builtin_path(), tmp_path_factory.mktemp("inspect") / "out")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("transformers")
    return inspect(builtin_path("llama"), tmp_path_factory.mktemp("inspect") / "out", text=SENTENCE)


def sections(page: str) -> dict[str, str]:
    """The pieces of a page by the id of their heading."""
    parts = page.split('<h2 id="')[1:]
    return {part[: part.index('"')]: part for part in parts}


# ---------------------------------------------------------------------------------------------------------- the page


@pytest.mark.slow
@pytest.mark.parametrize("model", mostly_slow(["builtin", "llama"], ["builtin"]))
def test_the_page_is_whole(model: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(model)
    page = found.page.read_text(encoding="utf-8")
    check_page(page, scripts=1)
    parts = sections(page)
    assert tuple(parts) == SECTIONS
    counts = {key: len(pictures(part)) for key, part in parts.items()}
    n_layers, n_maps = found.checkpoint.n_layers, len(found.compositions)
    above_chance = {
        scores.kind for scores in found.compositions.values() for *_, score in scores.largest(1) if score.multiple > 1
    }
    assert "K" in above_chance
    assert counts == {
        "predictions": 0,
        "composition": n_maps,
        # the strongest pair of every kind, of two layers alone all their terms, the one kind of block, frozen patterns
        "diagrams": len(above_chance) + (model == "builtin") + 1 + 1,
        "spectra": 2,
        "heads": 1,
        "gauge": 0,
        "patterns": n_layers,
    }


@pytest.mark.slow
def test_the_page_states_the_numbers_that_are_returned(builtin: Any) -> None:
    parts = {key: check_text(part) for key, part in sections(builtin.page.read_text(encoding="utf-8")).items()}
    assert set(builtin.compositions) == {"Q", "K", "V"}
    for one in builtin.compositions.values():
        for writer, reader, score in one.largest(5):
            cells = [one.kind, "{}.{}".format(*writer), "{}.{}".format(*reader)]
            row = "|".join([*cells, f"{score.score:.3f}", f"{score.chance:.3f}"])
            assert (row in parts["composition"]) == (score.multiple >= 1.0)
    for report in builtin.gauges:
        assert f"{report.n_parameters:,}|{report.n_free:,}" in parts["gauge"]
    assert "Previous-token head 0.3" in parts["heads"]
    assert builtin.compositions["K"].largest(1)[0][0] == (0, 3)
    copying = builtin.readings.copying
    assert copying.embeddings.shape == copying.first_layer.shape == (2, 4)
    assert min(copying.embeddings[1].min(), copying.first_layer[1].min()) > 0.9
    assert builtin.readings.scores.largest("previous", 1)[0][0] == (0, 3)
    read = [(one.layer, one.head) for one in builtin.readings.heads]
    assert sorted(read) == list(np.ndindex(2, 4))
    assert read[0] == (0, 3)  # the highest score first: the head that the page opens


@pytest.mark.slow
def test_the_page_opens_with_its_findings(builtin: Any) -> None:
    page = builtin.page.read_text(encoding="utf-8")
    listed = page[page.index('<ul class="findings">') : page.index("</ul>")]
    for text, section, (headings, rows) in findings(builtin):
        assert f'{html.escape(text)} <a href="#{section}">' in listed
        assert f'<h2 id="{section}">' in page
        assert all(len(row) == len(headings) for row in rows)
        assert all(html.escape(cell) in listed for row in rows for cell in row)
    assert page.index("findings") < page.index("<nav>")


def test_findings_name_heads_by_their_measurements(measured: Any) -> None:
    texts = [finding.text for finding in findings(measured)]
    scores, short = measured.readings.scores, measured.readings.short_scores
    assert any(text.startswith("Head 0.3 attends to the previous token: 0.87") for text in texts)
    assert scores.induction[1].min() > 0.7
    names = " ".join(f"1.{head}" for head in np.argsort(-scores.induction[1]))  # the highest score first
    (induction,) = (text for text in texts if "attend to the token after" in text)
    assert induction.split(" attend")[0].replace(",", "").replace(" and", "") == f"Heads {names}"
    assert any("reads by its" in text and "head 0.3 writes" in text for text in texts)
    # head 1.3 attends to the first token wherever less than half of the context precedes
    assert short.induction[1, 3] < 0.1 < short.induction[1, :3].min()
    (own,) = (text for text in texts if "first token" in text)
    assert "head 1.3 gives 99 %" in own
    assert "later positions only" in own


def test_findings_of_a_model_that_was_not_run(measured: Any) -> None:
    readings = dataclasses.replace(measured.readings, scores=None, short_scores=None, copying=None, induction=None)
    bare = dataclasses.replace(
        measured, readings=readings, tokens=None, patterns=None, predictions=None, compositions={}
    )
    assert [finding.section for finding in findings(bare)] == ["heads", "spectra", "gauge"]  # overlaps of weights


def check_text(part: str) -> str:
    """The text of a piece, cells of tables apart."""
    import re

    return html.unescape(re.sub(r"<[^>]*>", "", part.replace("</td><td>", "|")))


@pytest.mark.parametrize("model", mostly_slow(["measured", "llama"], ["measured"]))
def test_patterns_are_those_of_the_model(model: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(model)
    seen = run(read_weights(found.checkpoint, dtype=np.float32), found.tokens.ids)  # the precision of the page
    assert len(found.patterns) == found.checkpoint.n_layers
    for mine, own in zip(found.patterns, seen.patterns, strict=True):
        np.testing.assert_array_equal(mine, own[0])
    if model == "measured":
        n = len(found.tokens.ids)
        np.testing.assert_array_equal(found.tokens.ids[: n // 2], found.tokens.ids[n // 2 :])


def test_predictions_are_those_of_the_model(measured: Any) -> None:
    forward, found = run(measured.checkpoint, measured.tokens.ids), measured.predictions
    logits = forward.logits[0]
    order = np.argsort(-logits, axis=1)[:, :3]
    assert [[int(name) for name in row] for row in found.names] == order.tolist()
    p = np.exp(logits - logits.max(1, keepdims=True))
    want = np.take_along_axis(p / p.sum(1, keepdims=True), order, 1)
    np.testing.assert_allclose(found.probabilities, want, atol=1e-5)
    first, second = order[-1, :2]
    np.testing.assert_allclose(found.difference, logits[-1, first] - logits[-1, second], rtol=1e-4)
    # no norm: a head contributes its output in the direction of the difference
    names, parts = zip(*found.components, strict=True)
    assert sorted(names) == [f"{layer}.{head}" for layer, head in np.ndindex(2, 4)]
    assert (np.diff(np.abs(parts)) <= 0).all()
    frozen = tnlib_adapters.freeze(measured.checkpoint, measured.tokens.ids)
    want = {
        name: circuits.logit_contributions(frozen, int(first)).direct[k]
        - circuits.logit_contributions(frozen, int(second)).direct[k]
        for k, name in enumerate(circuits.logit_contributions(frozen, 0).names)
    }
    for name, value in found.components:
        np.testing.assert_allclose(value, want[name], atol=1e-4)
    texts = [finding.text for finding in findings(measured)]
    assert any(text.startswith(f"After the text, the most probable token is '{first}'") for text in texts)
    (circuit,) = (text for text in texts if text.startswith("Induction circuit"))
    assert "of head 0.3: the overlap" in circuit


@pytest.mark.slow
def test_tokens_are_named_as_the_tokenizer_names_them(llama: Any) -> None:
    names = llama.tokens.names
    assert "".join(names).replace("·", " ").replace("↵", "\n") == SENTENCE
    assert not any(letter.isspace() for name in names for letter in name)
    text = check_text(sections(llama.page.read_text(encoding="utf-8"))["patterns"])
    assert f"{len(names)} tokens" in text
    assert all(name in text for name in names)


@pytest.mark.slow
def test_what_depends_on_the_distance_is_shown_at_one(llama: Any) -> None:
    assert set(llama.compositions) == {"Q at distance 1", "K at distance 1", "V"}
    assert set(llama.spectra.qk) == {1}
    assert {one.distance for one in llama.readings.heads} == {1}
    assert any("depend on the distance" in note for note in llama.notes)


@pytest.mark.slow
def test_the_same_model_and_text_give_the_same_page(builtin: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(builtin.tokens.names))
    again = inspect(builtin_path(), tmp_path / "again", text_file=text)
    assert again.page.read_bytes() == builtin.page.read_bytes()


NASTY = ("<script>alert('&')</script>", "&amp;", "$x_1^", '"', "\N{CJK UNIFIED IDEOGRAPH-4E00}", "]]>", "-->", "w" * 40)


@pytest.mark.slow
def test_tokens_with_markup_stay_text(builtin: Any) -> None:
    ids = builtin.tokens.ids[:8]
    tokens = TokenSequence(ids, dict(zip(ids.tolist(), NASTY, strict=True)), cut=True)
    few = tuple(of_layer[:, :8, :8] for of_layer in builtin.patterns)
    page = page_of(dataclasses.replace(builtin, tokens=tokens, patterns=few, predictions=None), quiet)
    check_page(page, scripts=1)
    text = check_text(sections(page)["patterns"])
    assert all(name in text for name in NASTY)
    assert "Only the first 8 tokens" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", "Queries and keys are normalised"),
        ("gemma2", "depend on the distance"),
        ("bloom", "The weights of the norm in front"),
        ("vit", "The weights of the norm in front"),
    ],
)
def test_other_architectures_have_a_page(name: str, said: str, saved: Callable[[str], Any], tmp_path: Path) -> None:
    text = None if name == "vit" else "3 4 5 6 7 3 4 5"
    found = inspect(saved(name)[1], tmp_path / "out", text=text)
    page = found.page.read_text(encoding="utf-8")
    check_page(page, scripts=int(name != "vit"))
    parts = sections(page)
    assert tuple(parts) == SECTIONS
    assert any(said in note for note in found.notes)
    assert (found.patterns is None) == (name == "vit")
    kinds = 2 if name == "gemma2" else 1  # layers of gemma2 differ in their window
    assert parts["diagrams"].count("<h3>Block of layer") == kinds
    assert (found.predictions is None) == (name == "vit")
    assert ("most probable next tokens" in parts["predictions"]) == (name != "vit")


@pytest.mark.slow
def test_a_trained_bert(minilm_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = inspect(minilm_path, tmp_path / "out", text="The cat sat on the mat, and <script> costs $5.")
    check_page(found.page.read_text(encoding="utf-8"), scripts=1)
    assert found.tokens.names[:4] == ("[CLS]", "the", "cat", "sat")
    assert found.tokens.names[-1] == "[SEP]"
    assert {"<", "script", ">", "$"} <= set(found.tokens.names)
    (writer, reader, score), *_ = found.compositions["K"].largest(1)
    assert score.multiple > 3
    assert writer[0] < reader[0]
    assert found.readings.copying is None, "it ends in hidden states"


# -------------------------------------------------------------------------------------------------------- the numbers


def test_spectra_are_singular_values(measured: Any) -> None:
    for layer, head in np.ndindex(2, 4):
        attention = measured.checkpoint.attention(layer)
        for operator, said in (
            (attention.qk(head), measured.spectra.qk[None][layer, head]),
            (attention.ov(head), measured.spectra.ov[layer, head]),
        ):
            wanted = np.linalg.svd(operator.full().astype(float), compute_uv=False)
            np.testing.assert_allclose(said, wanted[:16], rtol=1e-6, atol=1e-6 * wanted[0])
            assert 1 <= effective_rank(said) <= 16


def test_effective_ranks_count_equal_values_at_any_scale() -> None:
    values = np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    for scale in (1.0, 1e-200, 1e200):
        np.testing.assert_allclose(effective_rank(scale * values), [3, 1, 0])


def small_layer(kind: str) -> Attention:
    d, heads, d_head = 5, 2, 2
    kv = 1 if kind == "grouped" else heads
    shapes = {"W_Q": (heads, d, d_head), "W_K": (kv, d, d_head), "W_V": (kv, d, d_head), "W_O": (heads, d_head, d)}
    if kind == "biases":
        shapes |= {"b_Q": (heads, d_head), "b_K": (kv, d_head), "b_V": (kv, d_head), "b_O": (d,)}
    arrays = {name: normal(shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    return Attention(**arrays, scale=1.0, rotary=Rotary([0.7]) if kind == "rotary" else None)  # type: ignore[arg-type]


def seen_of(layer: Attention) -> np.ndarray:
    """All that softmax and the stream see of a layer: scores up to what is alike for all keys, values, a constant."""
    distances = (None,) if layer.rotary is None else (0, 1, 2, 3)
    parts = [layer.qk(h, distance).full()[:, :-1] for h in range(layer.n_heads) for distance in distances]
    values = [layer.ov(h).full() for h in range(layer.n_heads)]
    constant = sum(ov[-1, :-1] for ov in values) + (0 if layer.b_O is None else layer.b_O)
    return np.concatenate([a.ravel() for a in (*parts, *(ov[:-1] for ov in values), constant)])


@pytest.mark.parametrize("kind", ["plain", "biases", "grouped", "rotary"])
def test_free_numbers_are_those_that_change_nothing(kind: str) -> None:
    layer = small_layer(kind)
    names = [n for n in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O") if getattr(layer, n) is not None]
    columns = []
    for name in names:
        own = getattr(layer, name)
        for k in np.ndindex(own.shape):
            ends = []
            for sign in (1, -1):  # exact of what is quadratic
                moved = own.copy()
                moved[k] += sign * 0.5
                ends.append(seen_of(dataclasses.replace(layer, **{name: moved})))
            columns.append(ends[0] - ends[1])
    report = gauge_report(layer)
    assert report.n_parameters == len(columns)
    assert np.linalg.matrix_rank(np.array(columns), rtol=1e-9) == report.n_parameters - report.n_free


def test_balanced_layers_have_quotients_of_one() -> None:
    fixed = tnlib_adapters.fix_gauge(open_checkpoint(builtin_path()).attention(0))
    bare = dataclasses.replace(fixed, b_Q=None, b_K=None, b_V=None)
    report = gauge_report(tnlib_adapters.fix_gauge(bare))
    np.testing.assert_allclose([*report.queries_to_keys, *report.values_to_outputs], 1, rtol=1e-5)


def test_large_models_show_as_many_layers_as_take_seconds() -> None:
    assert n_shown(Sizes(12, 12, 768)) == 12
    assert n_shown(Sizes(24, 16, 1024)) == 24
    assert 2 <= n_shown(Sizes(32, 32, 4096)) < 32
    assert n_shown(Sizes(80, 64, 8192)) == 2
    assert n_shown(Sizes(1, 96, 12288)) == 1


@pytest.mark.slow
def test_the_page_of_a_large_model_says_what_it_leaves_out(
    saved: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "measure.MOST_WORK",
        "measure.MOST_NUMBERS",
        "head_measurements.MOST_COPIED",
        "head_measurements.MOST_WORK",
    )
    for name in names:
        monkeypatch.setattr(f"tnlib_adapters.inspection.{name}", 1.0)
    source = saved("gpt2_lm")[1]
    quick = inspect(source, tmp_path / "quick")
    assert (quick.n_shown, quick.patterns, quick.readings.scores) == (2, None, None)
    assert len(quick.gauges) == len(quick.spectra.ov) == 2
    assert len(quick.readings.heads) == 1
    page = check_page(quick.page.read_text(encoding="utf-8"))
    for said in (
        "Of 3 layers the first 2 are measured",
        "run only if a text is given",
        "Copying is not measured",
    ):
        assert any(said in note for note in quick.notes)
        assert said in page.text

    monkeypatch.setattr("tnlib_adapters.inspection.sections.MOST_PANELS", 4)
    seen = inspect(source, tmp_path / "seen", text="3 4 5 3 4 5")
    assert [len(one) for one in seen.patterns] == [4, 4, 4], "the text runs through all layers"
    patterns = sections(seen.page.read_text(encoding="utf-8"))["patterns"]
    assert len(pictures(patterns)) == 1
    assert '"first":' in patterns, "all heads are in the explorer"
    assert seen.predictions is None


# ------------------------------------------------------------------------------------------------------ text and files


@pytest.mark.slow
def test_the_command_replaces_files_only_by_force(tmp_path: Path) -> None:
    source, out = builtin_copy(tmp_path / "<b>&amp;<script>"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    refusal = run_command("inspect", source, "--out", out, status=2)
    assert refusal.stderr.count("\n") == 1
    assert "--force" in refusal.stderr
    assert os.listdir(out) == ["mine.txt"]

    result = run_command("inspect", source, "--out", out, "--text", "5 6 7 5, 6", "--force")
    assert os.listdir(out) == [PAGE]
    assert len(os.listdir(tmp_path)) == 2
    assert str(out / PAGE) in result.stdout
    assert "strongest 0.3 to 1.1, 2.04 times chance" in result.stdout
    assert "drawing" in result.stderr
    page = (out / PAGE).read_text(encoding="utf-8")
    assert "<b>&amp;<script>, inside" in check_page(page, scripts=1).text
    assert "5 tokens" in check_text(sections(page)["patterns"])


def test_nothing_is_left_where_drawing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr(sys.modules["tnlib_adapters.inspection.inspect"], "page_of", fail)
    with pytest.raises(MemoryError):
        inspect(builtin_path(), tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--text", "5"], "at least two tokens, got 1"),
        (["--text", ""], "at least two tokens, got 0"),
        (["--text", "5 six"], "numbers of tokens from 0 to 127"),
        (["--text", "5 128"], "got '128'"),
        (["--text", "5 -1"], "got '-1'"),
        (["--text", "5 99999999999999999999"], "numbers of tokens"),
        (["--text", "5 6", "--text-file", "x"], "one place"),
        (["--text-file", "nowhere.txt"], "must be a text file, found none"),
    ],
)
def test_texts_that_are_none_are_refused(options: list[str], said: str, tmp_path: Path) -> None:
    result = run_command("inspect", "builtin", "--out", tmp_path / "out", *options, status=2)
    assert said in result.stderr
    assert result.stderr.startswith("Error: inspect: ")
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe5")
    with pytest.raises(tnlib.ArgumentError, match="UTF-8"):
        inspect(builtin_path(), tmp_path / "other", text_file=bad)


def test_a_model_of_images_reads_no_text(saved: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(tnlib.ArgumentError, match="inspect: text must be left out for a model of images"):
        inspect(saved("vit")[1], tmp_path / "out", text="3 4")


def test_no_folder_no_page(tmp_path: Path) -> None:
    run_command("inspect", tmp_path / "nowhere", "--out", tmp_path / "out", status=2)
    source = builtin_copy(tmp_path / "in")
    inside = run_command("inspect", source, "--out", source / "out", status=2)
    assert "must lie outside IN" in inside.stderr


def test_long_texts_are_cut() -> None:
    model = open_checkpoint(builtin_path())
    found = read_tokens(model, " ".join(str(k % 128) for k in range(500)))
    assert found.cut
    assert len(found.ids) == len(found.names) == 80
    assert not read_tokens(model, "1 2 3").cut


def test_without_transformers_the_text_is_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = open_checkpoint(builtin_path("llama"))
    found = read_tokens(model, "309 309")
    assert found.names == ("·in", "·in")
    with pytest.raises(tnlib.ArgumentError, match="numbers of tokens from 0 to 1023"):
        read_tokens(model, "def f")
