"""Baselines of the study against the formulas of their papers, and the study of bits on small models."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import normal
from slow_cases import mostly_slow

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tnlib_adapters.compression.methods.components import Components
from transformers_models import made_up_text, quiet, random_model, save_with_tokenizer

from benchmarks.baselines import BASELINES
from benchmarks.bits import TNLIB, Subject, measurements
from benchmarks.quantizers import (
    Grid,
    awq,
    count_component,
    global_ranks,
    gptq,
    largest_products,
    largest_units,
    low_rank,
    nystroem,
    query_key_basis,
    round_to_nearest,
    stored,
    svd_llm,
    two_sided,
    value_basis,
)

N_INPUTS, N_OUTPUTS = 12, 5
GRIDS = [Grid(bits, group, symmetric) for bits in (1, 2, 4) for group in (4, 5, 0) for symmetric in (False, True)]


def inputs(seed: int = 0, n: int = N_INPUTS) -> np.ndarray:
    """Correlated inputs (40, n) of different sizes."""
    return normal((40, n), seed=seed) @ normal((n, n), seed=seed + 1) * np.linspace(0.2, 3.0, n)[::-1]


def loss(x: np.ndarray, weight: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(x @ (weight - other)) ** 2)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rounding_uses_the_values_of_a_grid_that_bits_count(grid: Grid) -> None:
    weight = normal((N_INPUTS, N_OUTPUTS))
    rounded = round_to_nearest(weight, grid)
    n_groups = -(-N_INPUTS // grid.group) if grid.group else 1
    with_zero = not grid.symmetric and grid.bits > 1
    assert rounded.n_bits == N_OUTPUTS * (N_INPUTS * grid.bits + n_groups * (16 + with_zero * grid.bits))
    for start in grid.starts(N_INPUTS):
        own = slice(start, start + (grid.group or N_INPUTS))
        scale, zero = grid.fit(weight[own])
        codes = rounded.weight[own] / scale + zero
        np.testing.assert_allclose(codes, np.rint(codes), atol=1e-9)
        assert codes.min() > -1e-9
        assert codes.max() < 2**grid.bits - 1 + 1e-9
        assert (zero == (2**grid.bits - 1) / 2).all() or with_zero
        assert (scale == scale.astype(np.float16)).all()


def test_a_zero_point_shifts_the_grid_and_clipping_lowers_the_error() -> None:
    weight = np.abs(normal((64, 6))) + 0.1
    asymmetric, symmetric = (round_to_nearest(weight, Grid(3, 32, one)).weight for one in (False, True))
    assert np.linalg.norm(asymmetric - weight) < 0.7 * np.linalg.norm(symmetric - weight)
    weight = normal((64, 6))
    clipped, unclipped = (round_to_nearest(weight, Grid(2, 0), search=one).weight for one in (True, False))
    assert np.linalg.norm(clipped - weight) < 0.9 * np.linalg.norm(unclipped - weight)


@pytest.mark.parametrize("activation_order", [False, True])
def test_gptq_is_the_sequential_optimal_brain_surgeon(activation_order: bool) -> None:
    """Round one input, move the others to their optimum given it, with the inverse of the remaining Hessian anew."""
    x, weight, grid = inputs(), normal((N_INPUTS, N_OUTPUTS), seed=3), Grid(3, 0)
    moments = x.T @ x
    hessian = moments + 0.01 * np.diag(moments).mean() * np.eye(N_INPUTS)
    scale, zero = grid.fit(weight)
    left, errors = weight.copy(), 0.0
    remaining = list(np.argsort(-np.diag(moments)) if activation_order else range(N_INPUTS))
    while remaining:
        inverse = np.linalg.inv(hessian[np.ix_(remaining, remaining)])
        first = remaining[0]
        difference = left[first] - grid.round(left[first], scale, zero)
        errors += (difference**2).sum() / inverse[0, 0]
        left[remaining] -= np.outer(inverse[:, 0] / inverse[0, 0], difference)
        remaining = remaining[1:]
    rounded = gptq(weight, moments, grid, activation_order=activation_order)
    np.testing.assert_allclose(rounded.weight, left, atol=1e-10)
    difference = rounded.weight - weight
    assert np.vdot(difference, hessian @ difference) == pytest.approx(errors)
    assert rounded.n_bits == grid.count(weight.shape)


def test_gptq_in_groups_loses_less_than_nearest_and_without_correlations_is_nearest() -> None:
    x, weight = inputs(), normal((N_INPUTS, 40), seed=3)
    for grid in (Grid(2, 4), Grid(3, 4, symmetric=True), Grid(4, 5)):
        nearest = round_to_nearest(weight, grid).weight
        assert loss(x, weight, gptq(weight, x.T @ x, grid).weight) < 0.8 * loss(x, weight, nearest)
        np.testing.assert_array_equal(gptq(weight, np.eye(N_INPUTS), grid).weight, nearest)


def test_gptq_drops_inputs_that_are_always_zero() -> None:
    moments = np.diag([1.0, 0.0, 2.0])
    rounded = gptq(normal((3, 2)), moments, Grid(8, 0)).weight
    np.testing.assert_array_equal(rounded[1], 0)


def test_awq_takes_the_best_power_of_the_magnitudes() -> None:
    x, weight, grid = inputs(), normal((N_INPUTS, N_OUTPUTS), seed=3), Grid(3, 4)
    magnitudes = np.abs(x).mean(0)
    losses = {}
    for alpha in np.arange(20) / 20:
        scale = magnitudes**alpha
        scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float16).astype(float)[:, None]
        losses[alpha] = loss(x, weight, round_to_nearest(weight * scale, grid, search=False).weight / scale), scale
    _, scale = min(losses.values(), key=lambda one: one[0])
    assert min(one for one, _ in losses.values()) < losses[0.0][0]
    importance = np.diag(x.T @ x) / scale[:, 0] ** 2
    expected = round_to_nearest(weight * scale, grid, importance).weight / scale
    stored_scales, folded = (awq(weight, x.T @ x, magnitudes, grid, folded=one) for one in (False, True))
    np.testing.assert_allclose(stored_scales.weight, expected)
    assert stored_scales.n_bits == folded.n_bits + 16 * N_INPUTS == grid.count(weight.shape) + 16 * N_INPUTS


@pytest.mark.parametrize("shape", [(N_INPUTS, N_OUTPUTS), (N_INPUTS, 20)])
def test_svd_llm_loses_the_squares_of_the_discarded_singular_values(shape: tuple[int, int]) -> None:
    x, weight = inputs(), normal(shape, seed=3)
    sizes = np.linalg.svd(x @ weight, compute_uv=False)  # those of R W with R^T R = x^T x
    parts = svd_llm(weight, x.T @ x)
    for rank in (1, 4):
        left, right = parts.first(rank)
        assert loss(x, weight, left @ right) == pytest.approx((sizes[rank:] ** 2).sum())
        assert parts.losses[rank:].sum() == pytest.approx((sizes[rank:] ** 2).sum())
        half = low_rank(parts, rank)
        assert loss(x, weight, half.weight) == pytest.approx((sizes[rank:] ** 2).sum(), rel=0.01)
        assert half.n_bits == 16 * rank * sum(shape)
        eighth = low_rank(parts, rank, 8)
        assert eighth.n_bits == rank * (8 * sum(shape) + 32)
        assert 0 < np.abs(eighth.weight - half.weight).max() < 0.02 * np.abs(weight).max()


def test_the_two_sided_truncation_is_that_of_the_whitened_weight() -> None:
    x, p, weight = inputs(), inputs(5, N_OUTPUTS), normal((N_INPUTS, N_OUTPUTS), seed=3)
    u, sizes, vh = np.linalg.svd(x @ weight @ p.T, full_matrices=False)
    parts = two_sided(weight, x.T @ x, p.T @ p)
    left, right = parts.first(2)
    np.testing.assert_allclose(x @ left @ right @ p.T, u[:, :2] * sizes[:2] @ vh[:2], atol=1e-6 * sizes[0])
    np.testing.assert_allclose(parts.losses, sizes[:N_OUTPUTS] ** 2, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 16])
def test_global_ranks_spend_a_budget_on_the_largest_losses_per_bit(bits: int) -> None:
    parts = [
        Components(np.zeros((n, 4)), np.zeros((4, n)), np.sort(normal((4,), seed=n) ** 2)[::-1]) for n in (3, 4, 6)
    ]
    costs = [count_component((n, n), bits) for n in (3, 4, 6)]
    budget = 5 * costs[1]
    ranks = global_ranks(parts, budget, bits)
    spent = sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))
    assert budget - max(costs) < spent <= budget
    kept = [part.losses[rank - 1] / cost for part, rank, cost in zip(parts, ranks, costs, strict=True) if rank]
    cheap = [
        part.losses[rank] / cost
        for part, rank, cost in zip(parts, ranks, costs, strict=True)
        if rank < 4 and cost <= budget - spent
    ]
    assert min(kept) >= max(cheap, default=0.0)


def test_nystroem_keeps_units_of_largest_leverage_and_reconstructs_the_others() -> None:
    x, weight = inputs(), normal((N_INPUTS, N_OUTPUTS), seed=3)
    moments = x.T @ x
    kept, new = nystroem(weight, moments, 7)
    ridge = np.trace(moments) / N_INPUTS * np.eye(N_INPUTS)
    scores = np.diag(moments @ np.linalg.inv(moments + ridge))
    assert set(kept) == set(np.argsort(scores)[-7:])
    best = np.linalg.lstsq(x[:, kept], x @ weight, rcond=None)[0]  # C_SS^-1 C_S: W is least squares on the kept units
    np.testing.assert_allclose(new, best, rtol=1e-5)


def test_units_and_dimensions_are_kept_by_products_of_norms() -> None:
    x, weight = inputs(), normal((N_INPUTS, N_OUTPUTS), seed=3)
    norms = np.linalg.norm(x, axis=0) * np.linalg.norm(weight, axis=1)
    assert set(largest_units(weight, x.T @ x, 5)) == set(np.argsort(norms)[-5:])
    q, k = inputs(1), inputs(2)
    norms = np.linalg.norm(q, axis=0) * np.linalg.norm(k, axis=0)
    assert set(largest_products(q.T @ q, k.T @ k, 3, rotary=False)) == set(np.argsort(norms)[-3:])
    pairs = np.hypot(*np.split(np.linalg.norm(q, axis=0), 2)) * np.hypot(*np.split(np.linalg.norm(k, axis=0), 2))
    first = np.argsort(pairs)[-2:]
    assert set(largest_products(q.T @ q, k.T @ k, 5, rotary=True)) == {*first, *(first + N_INPUTS // 2)}


def test_bases_of_a_head_give_the_truncated_svd_of_its_products() -> None:
    q, k, v, o = inputs(1), inputs(2), inputs(3), normal((N_INPUTS, 7), seed=4)
    to, back = query_key_basis(q.T @ q, k.T @ k, 3)
    sizes = np.linalg.svd(q @ k.T, compute_uv=False)
    np.testing.assert_allclose(back.T @ to, np.eye(3), atol=1e-7)
    assert np.linalg.norm(q @ k.T - q @ to @ back.T @ k.T) ** 2 == pytest.approx((sizes[3:] ** 2).sum())
    to, back = value_basis(o, v.T @ v, 3)
    sizes = np.linalg.svd(v @ o, compute_uv=False)
    np.testing.assert_allclose(back @ to, np.eye(3), atol=1e-7)
    assert loss(v, o, to @ back @ o) == pytest.approx((sizes[3:] ** 2).sum())


def test_stored_columns_err_by_half_a_step() -> None:
    columns = normal((30, 4))
    steps = np.abs(columns).max(0) / 127
    assert (np.abs(stored(columns, 8) - columns).max(0) <= 0.55 * steps).all()
    assert len(np.unique(stored(columns, 8)[:, 0] / steps[0]).round(0)) > 20
    np.testing.assert_allclose(stored(columns, 16), columns, rtol=2**-11)


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


@pytest.mark.parametrize("name", mostly_slow(NAMES, ["llama_tied"]))
@pytest.mark.slow
def test_original_weights_give_the_original_model_and_others_do_not(name, subjects, statistics) -> None:
    subject, parts = subjects[name], statistics[name].parts
    assert error(subject, parts, [part.weight for part in parts]) == pytest.approx(0, abs=1e-6)
    for changed in range(len(parts)):
        weights = [part.weight * (1.5 if k == changed else 1.0) for k, part in enumerate(parts)]
        assert error(subject, parts, weights) > 1e-6


@pytest.mark.parametrize("name", mostly_slow(NAMES, ["llama_tied"]))
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


@pytest.mark.slow
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
