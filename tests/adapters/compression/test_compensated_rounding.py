"""Error-compensating rounding: losses as inequalities, and sequential rounding in plain numpy as a reference."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import unchanged
from tnlib_adapters.compression.methods import compensated_rounding
from tnlib_adapters.compression.methods.compensated_rounding import round_compensated
from tnlib_adapters.compression.methods.components import components, rounding_loss
from tnlib_adapters.compression.methods.quantized import Forms, Metric, QuantizedWeight, values_of
from tnlib_adapters.factors.integers import BITS, IntegerFormat, Integers
from tnlib_adapters.factors.rounding import round_to_nearest

Array = np.ndarray
MOMENTS = ("none", "full", "singular", "zero", "steep", "diagonal")


def moments(kind: str, n: int, rng: np.random.Generator) -> Array | None:
    """Second moments of n features: of many samples, of two, of none, or of features of very different sizes."""
    if kind == "none":
        return None
    if kind == "diagonal":
        return np.asarray(rng.uniform(0, 3, n) * (rng.random(n) < 0.7))
    counts = {"full": 3 * n, "singular": 2, "zero": 0, "steep": 3 * n}
    x = rng.standard_normal((counts[kind], n)) @ (np.eye(n) + rng.standard_normal((n, n)))
    x *= 10.0 ** rng.uniform(-3, 3, n) if kind == "steep" else 1.0
    return np.asarray(x.T @ x * 10.0 ** rng.uniform(-20, 20))


def damped(a: Array | None, n: int, share: float) -> Array:
    """Return the metric that is minimised: moments of mean 1, plus a share of the identity."""
    if a is None:
        return np.eye(n)
    full = np.diag(a) if a.ndim == 1 else a
    mean = np.trace(full) / n
    return np.eye(n) if mean <= 0 else full / mean + share * np.eye(n)


def metric(weight: Array, reads: Array | None, slopes: Array | None) -> tuple[Array, Array]:
    m, n = weight.shape
    return damped(reads, m, 0.01), damped(slopes, n, 0.1)


def loss(weight: Array, integers: Integers, left: Array, right: Array) -> float:
    """Return tr(P E^T A E) in units of the largest entry, by its definition."""
    size = float(np.abs(weight).max()) or 1.0
    error = weight.astype(np.float64) / size - integers.values(np.float64) / size
    return float(np.trace(right @ error.T @ left @ error))


def assert_valid(integers: Integers, form: IntegerFormat, shape: tuple[int, int]) -> None:
    low, high = (0, 2**form.bits - 1) if form.is_packed else (-127, 127)
    assert integers.codes.shape == shape
    assert integers.codes.min() >= low
    assert integers.codes.max() <= high
    assert integers.format == form
    assert np.isfinite(integers.scales).all()


@st.composite
def cases(draw: Any) -> tuple[Array, IntegerFormat, Array | None, Array | None]:
    m, n = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "normal", "zero", "zero rows", "heavy"]))
    weight = rng.standard_normal((m, n)) * (kind != "zero")
    if kind == "zero rows":
        weight[rng.random(m) < 0.5], weight[:, rng.random(n) < 0.3] = 0, 0
    if kind == "heavy":
        weight = weight**5
    weight = weight * draw(st.sampled_from([1.0, 1e-30, 1e30])) / (np.abs(weight).max() or 1.0)
    weight = weight.astype(draw(st.sampled_from([np.float32, np.float64])))
    order = draw(st.sampled_from(["C", "F", "strided", "read-only"]))
    if order == "F":
        weight = np.asfortranarray(weight)
    if order == "strided":
        weight = np.repeat(np.repeat(weight, 2, 0), 3, 1)[::2, ::3]
    weight.flags.writeable = order != "read-only"
    reads = moments(draw(st.sampled_from(MOMENTS)), m, rng)
    slopes = moments(draw(st.sampled_from(MOMENTS[:-1])), n, rng)
    form = IntegerFormat(draw(st.sampled_from(BITS)), draw(st.integers(0, 1)), draw(st.sampled_from([0, 1, 4, 7, 16])))
    return weight, form, reads, slopes


@given(cases())
def test_no_loss_is_above_that_of_rounding_to_nearest(case: Any) -> None:
    weight, form, reads, slopes = case
    with unchanged(*(a for a in (weight, reads, slopes) if a is not None)):
        greedy, descended = (round_compensated(weight, form, reads, slopes, descend=each) for each in (False, True))
    measured = metric(weight, reads, slopes)
    nearest = loss(weight, round_to_nearest(weight, form), *measured)
    one, two = (loss(weight, integers, *measured) for integers in (greedy, descended))
    slack = 1e-9 * nearest + 1e-25
    assert one <= nearest + slack
    assert two <= one * (1 + 1e-6) + slack  # the descent, in single precision, does not raise it
    for integers in (greedy, descended):
        assert_valid(integers, form, weight.shape)


@given(cases())
def test_order_and_layout_of_the_arguments_do_not_matter(case: Any) -> None:
    weight, form, reads, slopes = case
    once = round_compensated(weight, form, reads, slopes)
    again = round_compensated(weight.copy(), form, reads, slopes)
    np.testing.assert_array_equal(once.codes, again.codes)
    np.testing.assert_array_equal(once.scales, again.scales)


@given(cases())
def test_slabs_of_a_large_matrix_lose_no_more_than_the_whole(case: Any) -> None:
    weight, form, reads, slopes = case
    measured = metric(weight, reads, slopes)
    nearest = loss(weight, round_to_nearest(weight, form), *measured)
    for descend in (False, True):
        with patch.object(compensated_rounding, "_SLAB", 60):
            slabs = round_compensated(weight, form, reads, slopes, descend=descend)
        assert_valid(slabs, form, weight.shape)
        least = (
            nearest
            if descend
            else loss(weight, round_compensated(weight, form, reads, slopes, descend=False), *measured)
        )
        assert loss(weight, slabs, *measured) <= least * (1 + 1e-6) + 1e-9 * nearest + 1e-25


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from([2.0**-60, 1e-30, 1e30, 2.0**60]))
def test_the_scale_of_moments_does_not_matter(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    weight, form = rng.standard_normal((9, 5)), IntegerFormat(3, 0, 4)
    reads, slopes = np.cov(rng.standard_normal((9, 40))), np.cov(rng.standard_normal((5, 40)))
    one = round_compensated(weight, form, reads, slopes)
    other = round_compensated(weight, form, scale * reads, slopes / scale)
    left, right = metric(weight, reads, slopes)
    np.testing.assert_allclose(loss(weight, other, left, right), loss(weight, one, left, right), rtol=1e-6)


def rounded_in_sequence(weight: Array, nearest: Integers, left: Array, right: Array) -> Array:
    """Return the values of GPTQ on all entries of W as one vector, with the metric A (x) P.

    The error of an entry is distributed over those that are not rounded yet by the Cholesky factor of the inverse of
    the metric. Rows and columns of the largest moments come first.
    """
    form, (m, n) = nearest.format, weight.shape
    rows, columns = (np.argsort(np.diag(a), kind="stable")[::-1] for a in (left, right))
    order = [i * n + j for i in rows for j in columns]
    (axis,) = form.axes
    step = np.repeat(nearest.scales.astype(np.float64), form.group_sizes(weight.shape[axis]), axis).ravel()[order]
    inverse = np.linalg.inv(np.kron(left, right)[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    rest, values = weight.astype(np.float64).ravel()[order], np.zeros(m * n)
    low, high = (0, 2**form.bits - 1) if form.is_packed else (-127, 127)
    for k in range(m * n):
        code = np.clip(np.floor(rest[k] / (step[k] or 1.0) + form.centre + 0.5), low, high)
        values[k] = step[k] * (code - form.centre)
        rest[k:] -= upper[k, k:] * (rest[k] - values[k]) / upper[k, k]
    found = np.empty(m * n)
    found[order] = values
    return found.reshape(m, n)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("axis", "group"), [(0, 0), (0, 3), (1, 2)])
@pytest.mark.parametrize(
    "shape", [(7, 4), (1, 5), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((4, 7), (6, 6), (5, 1)))]
)
@pytest.mark.parametrize("given_moments", ["reads", "slopes", "both"])
def test_without_descent_it_is_gptq(
    given_moments: str, shape: tuple[int, int], axis: int, group: int, bits: int, zeros: bool
) -> None:
    """With one of the moments it is GPTQ, with both the same on the Kronecker product of the two."""
    rng = np.random.default_rng([*shape, axis, group, bits])
    weight, form = rng.standard_normal(shape), IntegerFormat(bits, axis, group)
    if zeros:  # a group of zeros has one grid value, 0, which errors of other entries must not change
        weight[:3] = 0 if axis == 0 and group else weight[:3]
        weight[:, 0] = 0
    reads = moments("full", shape[0], rng) if given_moments != "slopes" else None
    slopes = moments("full", shape[1], rng) if given_moments != "reads" else None
    left, right = metric(weight, reads, slopes)
    nearest = round_to_nearest(weight, form)
    wanted = rounded_in_sequence(weight, nearest, left, right)
    error = weight - wanted
    found = round_compensated(weight, form, reads, slopes, descend=False)
    if np.trace(right @ error.T @ left @ error) > loss(weight, nearest, left, right) * np.abs(weight).max() ** 2:
        wanted = nearest.values(np.float64)
    np.testing.assert_allclose(found.values(np.float64), wanted, atol=1e-12)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 1)])
@pytest.mark.parametrize("kind", ["full", "singular"])
def test_no_single_code_can_move_to_a_smaller_loss(kind: str, shape: tuple[int, int], bits: int) -> None:
    rng = np.random.default_rng([*shape, bits])
    weight, form = rng.standard_normal(shape), IntegerFormat(bits, 0)
    reads, slopes = moments(kind, shape[0], rng), moments(kind, shape[1], rng)
    measured = metric(weight, reads, slopes)
    found = round_compensated(weight, form, reads, slopes)
    least = loss(weight, found, *measured)
    for i, j in np.ndindex(shape):
        for step in (-1, 1):
            codes = found.codes.astype(int)
            codes[i, j] += step
            if 0 <= codes[i, j] < 2**bits:
                moved = Integers(codes.astype(np.uint8), found.scales, form)
                assert loss(weight, moved, *measured) >= least * (1 - 1e-9)


@pytest.mark.parametrize("descend", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("axis", "group"), [(0, 0), (0, 4), (1, 0), (1, 5)])
@pytest.mark.parametrize("shape", [(8, 5), (5, 8)])
def test_weights_on_the_grid_are_returned(
    shape: tuple[int, int], axis: int, group: int, bits: int, descend: bool
) -> None:
    rng = np.random.default_rng(bits)
    form = IntegerFormat(bits, axis, group)
    low, high = (0, 2**bits - 1) if form.is_packed else (-127, 127)
    codes = np.moveaxis(rng.integers(low, high + 1, shape), axis, -1)
    codes[..., :: group or 100] = high  # the largest entry of a group sets its scale
    codes = np.moveaxis(codes, -1, axis).astype(np.uint8 if form.is_packed else np.int8)
    scales = np.exp2(rng.integers(-5, 5, form.scale_shape(shape))).astype(np.float32)
    weight = Integers(codes, scales, form).values(np.float64)
    reads, slopes = moments("full", shape[0], rng), moments("full", shape[1], rng)
    found = round_compensated(weight, form, reads, slopes, descend=descend)
    np.testing.assert_array_equal(found.values(np.float64), weight)
    assert rounding_loss(weight - found.values(np.float64), reads, slopes) == 0


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_the_loss_is_its_definition(m: int, n: int, seed: int) -> None:
    """tr(P E^T A E) = sum of the squares of X E P^(1/2) over samples."""
    rng = np.random.default_rng(seed)
    error, x, p = rng.standard_normal((m, n)), rng.standard_normal((20, m)), rng.standard_normal((20, n))
    reads, slopes = x.T @ x, p.T @ p
    for a, left in ((reads, x), (None, np.eye(m)), (np.diag(reads), np.diag(np.sqrt(np.diag(reads))))):
        for b, right in ((slopes, p), (None, np.eye(n))):
            wanted = np.linalg.norm(left @ error @ right.T) ** 2
            np.testing.assert_allclose(rounding_loss(error, a, b), wanted, rtol=1e-9)


@pytest.mark.parametrize("reads", ["none", "singular"])
def test_zeros_have_one_stored_form(reads: str) -> None:
    """Their components are arbitrary, and moments of these are no moments to roundoff."""
    rng = np.random.default_rng(0)
    m, n = 130, 129
    own = QuantizedWeight(np.zeros((m, n), np.float32), Metric(moments(reads, m, rng), moments("singular", n, rng)))
    (option,) = own.options
    assert (option.form.bits, option.rank, option.loss) == (2, None, 0)
    assert not own.rounded(0)[0].values().any()


def draw_weight(m: int, n: int, spectrum: Array, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return a weight with these singular values, and moments of inputs and gradients."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((k, len(spectrum))))[0] for k in (m, n))
    x, p = rng.standard_normal((3 * m, m)), rng.standard_normal((3 * n, n))
    return ((u * spectrum) @ v.T).astype(np.float32), x.T @ x, p.T @ p


def test_mixed_factors_lose_less_than_components_apart() -> None:
    weight, reads, slopes = draw_weight(60, 50, 0.8 ** np.arange(50))
    own = QuantizedWeight(weight, Metric(reads, slopes))
    factors = [(k, option) for k, option in enumerate(own.options) if option.rank is not None and option.form.bits == 3]
    (k, option) = factors[-1]
    both = components(weight.astype(np.float64), reads, slopes)
    left = round_compensated(both.left[:, : option.rank], IntegerFormat(3, 0), reads).values(np.float64)
    moments_of_left = left.T @ reads @ left
    refitted = np.linalg.solve(moments_of_left, left.T @ reads @ weight)
    right = round_compensated(refitted, IntegerFormat(3, 1), moments_of_left, slopes).values(np.float64)
    apart = rounding_loss(weight - left @ right, reads, slopes)
    assert rounding_loss(weight - values_of(own.rounded(k), weight.dtype), reads, slopes) < 0.6 * apart


@pytest.mark.parametrize("fewer_numbers", [False, True])
def test_losses_of_options_are_those_of_their_weights(fewer_numbers: bool) -> None:
    """Those of factors are interpolated over ranks, those above 4 bits extrapolated; the descent lowers all."""
    weight, reads, slopes = draw_weight(70, 64, 0.95 ** np.arange(64))
    own = QuantizedWeight(weight, Metric(reads, slopes, 2.0), forms=Forms(fewer_numbers=fewer_numbers))
    forms = {(option.rank is not None, option.form.bits): k for k, option in enumerate(own.options)}
    assert {(False, 4), (True, 2), (True, 3)} <= forms.keys()
    assert ((True, 6) in forms) == fewer_numbers
    for k in forms.values():
        option, rounded = own.options[k], own.rounded(k)
        stored = [(integers.format, integers.codes.shape) for integers in rounded]
        assert option.cost == sum(form.n_bits(shape) for form, shape in stored)
        assert option.numbers == sum(m * n for _, (m, n) in stored)
        measured = 2 * rounding_loss(weight - values_of(rounded, weight.dtype), reads, slopes)
        assert 0.6 * option.loss < measured < 1.2 * option.loss


@pytest.mark.parametrize("fewer_numbers", [False, True])
def test_no_option_undercuts_another(fewer_numbers: bool) -> None:
    weight, reads, slopes = draw_weight(40, 90, 0.9 ** np.arange(40))
    options = QuantizedWeight(weight, Metric(reads, slopes), forms=Forms(fewer_numbers=fewer_numbers)).options
    for a, b in itertools.permutations(options, 2):
        assert not (a.cost <= b.cost and a.loss <= b.loss and (a.numbers <= b.numbers or not fewer_numbers))
    is_fewer = [option.numbers < weight.size and option.form.bits > 3 for option in options]
    assert any(is_fewer) == fewer_numbers


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0.01, 100)), min_size=1, max_size=3), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_weights_of_a_fused_layer_have_the_same_options(weights: list[tuple[int, float]], seed: int) -> None:
    """They are those of the sums; a form that every weight alone would take is among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((300, 128)) * rng.uniform(0.1, 3, 128)
    forms = Forms(False, widths=(2, 3, 4, 8), groups=(0, 32), has_zero=True)

    def layer() -> list[QuantizedWeight]:
        own = np.random.default_rng(seed)
        return [
            QuantizedWeight(own.standard_normal((128, 32 * n)) ** 3, Metric(x.T @ x, None, scale), forms=forms)
            for n, scale in weights
        ]

    alone, fused = layer(), layer()
    fused[0].fuse(fused[1:], "layer")
    of_layer = [{option.form for option in weight.options} for weight in fused]
    assert all(of_weight == of_layer[0] for of_weight in of_layer)
    assert {weight.curve.fused for weight in fused} == {"layer"}
    assert set.intersection(*({option.form for option in weight.options} for weight in alone)) <= of_layer[0]
    whole = functools.reduce(operator.add, (weight.curve for weight in fused))
    assert (np.diff(whole.costs) > 0).all()
    assert (np.diff(whole.errors) < 0).all()
    for k, option in enumerate(fused[-1].options):
        assert fused[-1].rounded(k)[0].format == option.form


def test_correlated_inputs_gain_an_order_of_magnitude() -> None:
    """Ten samples of forty inputs leave thirty directions to which the errors can go."""
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((40, 20)), rng.standard_normal((10, 40))
    reads = x.T @ x
    for bits, factor in ((2, 0.1), (4, 0.1)):
        form = IntegerFormat(bits, 0)
        found, nearest = round_compensated(weight, form, reads), round_to_nearest(weight, form)
        losses = [rounding_loss(weight - integers.values(), reads) for integers in (found, nearest)]
        assert losses[0] < factor * losses[1]
