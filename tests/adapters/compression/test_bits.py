"""The study of bits per number: budgets, bits that are counted, and weights that are installed, on small models."""

from __future__ import annotations

import numpy as np
import pytest
from slow_cases import mostly_slow

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers_models import made_up_text, quiet, random_model, save_with_tokenizer

from benchmarks.baselines import BASELINES
from benchmarks.bits import TNLIB, Subject, measurements
from benchmarks.quantizers import Grid

NAMES = ("bert", "llama", "llama_tied")  # whose table of embeddings does not predict, is apart, and predicts
LOW_RANK = [name for name in BASELINES if name.startswith(("svd", "two", "mode", "a3"))]
TEXT = made_up_text(n_lines=400)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    quiet()
    return {
        name: Subject(save_with_tokenizer(random_model(name), tmp_path_factory.mktemp(name)), "all", [made_up_text(40)])
        for name in NAMES
    }


@pytest.fixture(scope="module")
def statistics(subjects):
    return {name: subject.parts(TEXT) for name, subject in subjects.items()}


def error(subject, parts, weights) -> float:
    (measures,) = subject.compare(parts, weights)
    return measures.get("divergence (nats a token)", 1 - measures.get("cosine, mean", 0.0))


@pytest.mark.parametrize("name", mostly_slow(NAMES, ["bert", "llama_tied"]))
def test_original_weights_give_the_original_model_and_others_do_not(name, subjects, statistics) -> None:
    subject, parts = subjects[name], statistics[name].parts
    assert error(subject, parts, [part.weight for part in parts]) == pytest.approx(0, abs=1e-6)
    for changed in range(len(parts)):
        weights = [part.weight * (1.5 if k == changed else 1.0) for k, part in enumerate(parts)]
        assert error(subject, parts, weights) > 1e-6


@pytest.mark.parametrize("name", mostly_slow(NAMES, ["bert", "llama_tied"]))
@pytest.mark.parametrize("method", BASELINES)
def test_bits_stay_below_a_budget_and_more_of_them_err_less(method, name, subjects, statistics) -> None:
    subject, model = subjects[name], statistics[name]
    errors = []
    for budget in (3, 20):
        setting, weights, n_bits = BASELINES[method](model, budget * subject.n_before)
        assert setting
        assert 0.4 * budget * subject.n_before < n_bits <= budget * subject.n_before
        errors.append(error(subject, model.parts, weights))
    assert errors[1] < 0.8 * errors[0]
    assert BASELINES[method](model, subject.n_before // 8) is None or method in LOW_RANK


@pytest.mark.parametrize("name", mostly_slow(NAMES, ["bert", "llama_tied"]))
@pytest.mark.parametrize("method", LOW_RANK)
def test_all_components_give_the_original_model(method, name, subjects, statistics) -> None:
    subject, model = subjects[name], statistics[name]
    _, weights, n_bits = BASELINES[method](model, 100 * subject.n_before)
    assert error(subject, model.parts, weights) < (3e-3 if "int8" in method else 1e-5)
    if not method.startswith(("mode", "a3")):
        bits, extra = (8, 32) if "int8" in method else (16, 0)
        assert n_bits == sum(min(shape) * (bits * sum(shape) + extra) for shape in model.shapes)


def test_statistics_are_moments_of_inputs(subjects, statistics) -> None:
    subject, model = subjects["bert"], statistics["bert"]
    by_key = {part.key: part for part in model.parts}
    for part in model.parts:
        assert np.linalg.eigvalsh(part.reads).min() > -1e-6 * np.trace(part.reads)
        assert (part.magnitudes**2 <= np.diag(part.reads) * (1 + 1e-5)).all()  # Jensen
    np.testing.assert_array_equal(by_key["0.q"].reads, by_key["0.v"].reads)
    values, outputs = by_key["0.v"].outputs, by_key["0.o"].reads
    assert np.trace(values) > np.trace(outputs)  # attention averages values
    assert [part.folded for part in model.parts[:4]] == [False, False, False, True]
    assert subject.n_before == sum(part.weight.size for part in model.parts) + subject.bias_bits // 32


def test_rows_count_biases_and_repeat_no_measurement(subjects) -> None:
    subject = subjects["bert"]
    rows = list(measurements(subject, TEXT, ["nearest, symmetric", "gptq"], [4.8, 4.79, 1.0]))
    shapes = [part.weight.shape for part in subject.parts(TEXT).parts]
    assert [(method, budget) for method, budget, _ in rows] == [
        (method, budget) for method in ("nearest, symmetric", "gptq") for budget in (4.8, 4.79)
    ]
    for method, budget, (setting, bits, measured, _) in rows:
        grid = Grid(int(setting.split()[0]), 0 if "rows" in setting else int(setting.split()[-1]), method != "gptq")
        n_bits = sum(grid.count(shape) for shape in shapes) + subject.bias_bits
        assert bits == pytest.approx(n_bits / subject.n_before)
        assert bits <= budget
        assert len(measured) == 1
    assert rows[0][2][2] is rows[1][2][2]


@pytest.mark.slow  # a whole compression, fits of layers included
def test_rows_of_tnlib_are_those_of_compress(subjects) -> None:
    subject = subjects["llama_tied"]
    ((method, budget, (_, bits, measured, _)),) = measurements(subject, TEXT, [TNLIB], [6])
    assert (method, budget) == (TNLIB, 6)
    assert 3 < bits <= 6
    (measures,) = measured
    assert 0 < measures["divergence (nats a token)"] < 0.3
