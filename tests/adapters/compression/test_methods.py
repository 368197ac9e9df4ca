"""Every method on one layer: what its curves promise is what its pieces hold, and truncation is the best there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from command_line import run_command
from compressed_folders import Dense, relative, tail
from oracles import normal, quietly, unchanged
from tnlib_adapters import cli
from tnlib_adapters.compression.methods.decompositions import (
    CPStack,
    Heads,
    TuckerStack,
    factorise_layer,
    refuse_unsplittable,
    split_evenly,
)
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.method_table import METHODS, TABLE
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes

D, HEADS = 12, 3
DH = D // HEADS
SIZES = Sizes(n_layers=1, n_heads=HEADS, d_model=D)


def layer(dtype: Any = np.float64, biases: str = "qkvo", seed: int = 0, scale: float = 1.0) -> Projections:
    """Weights and biases whose spectra decay, so that every rank errs differently."""
    weights = {}
    for k, name in enumerate(NAMES):
        u, _, vh = np.linalg.svd(normal((D, D), seed=seed + k))
        weights[name] = (scale * (u * 0.8 ** np.arange(D)) @ vh).astype(dtype)
    found = {name: (scale * 0.2 * normal((D,), seed=seed + 9 + k)).astype(dtype) for k, name in enumerate(biases)}
    return Projections(weights, found)


def dense(projections: Projections) -> Dense:
    wide = ({k: a.astype(np.float64) for k, a in one.items()} for one in (projections.weights, projections.biases))
    return Dense(*wide, n_heads=HEADS)


def multiplied_out(pieces: Sequence[FactoredMatrix], before: Projections) -> Dense:
    found = expand(pieces, SIZES)
    return dense(Projections({**before.weights, **found.weights}, {**before.biases, **found.biases}))


def blocks(method: str, one: Dense) -> list[np.ndarray]:
    """What each curve of a method is an approximation of, in the order of the curves."""
    if method == "heads":
        return [operator for operators in one.operators() for operator in operators]
    return [one.weights[name] for name in NAMES] if method in ("matrix", "ttm") else [one.stack()]


def last(found: Factorised) -> list[int]:
    return [len(curve.costs) - 1 for curve in found.curves]


def choices(found: Factorised, block: int) -> list[list[int]]:
    """Each option of one block beside the largest of all others."""
    whole = last(found)
    return [[*whole[:block], option, *whole[block + 1 :]] for option in range(whole[block] + 1)]


# ------------------------------------------------------------------------------------------------------ every method


def test_the_command_line_offers_every_method() -> None:
    for command in (cli.compress, cli.plan):
        (option,) = [one for one in command.params if "--method" in one.opts]
        assert tuple(option.type.choices) == tuple(TABLE)
        assert set(METHODS) < set(TABLE)
        shown = " ".join(run_command(command.name, "--help").stdout.split())
        for row in TABLE.values():
            assert f"{row.name} {row.help[0].upper()}{row.help[1:]}." in shown


@pytest.mark.parametrize("biases", ["qkvo", "o", ""])
@pytest.mark.parametrize("method", METHODS)
def test_costs_count_every_factor(method: str, biases: str) -> None:
    before = layer(biases=biases)
    found = factorise_layer(METHODS[method], before, SIZES)
    for block, curve in enumerate(found.curves):
        assert curve.costs.dtype.kind == "i"
        assert len(curve.costs) == len(curve.errors)
        assert (np.diff(curve.costs) > 0).all()
        assert (np.diff(curve.errors) <= 0).all()
        for choice in choices(found, block)[:: 1 if method != "cp" else 9]:
            pieces = found.matrices(choice)
            promised = sum(int(c.costs[k]) for c, k in zip(found.curves, choice, strict=True))
            assert sum(a.size for piece in pieces for a in piece.arrays.values()) == promised
            held = expand(pieces, SIZES).biases
            assert found.fixed == sum(b.size for name, b in before.biases.items() if name not in held)
    largest = found.fixed + sum(int(curve.costs[-1]) for curve in found.curves)
    assert largest == 4 * D * D + D * len(biases), "the largest options cost what the model had"


@pytest.mark.parametrize(("biases", "dtype"), [("qkvo", "f8"), ("qv", "f8"), ("", "f8"), ("qko", "f4")])
@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker"])
def test_errors_are_the_true_ones(method: str, biases: str, dtype: str) -> None:
    """Curves hold squared relative errors; for cp they are a stand-in, known only once a rank is fitted."""
    before, allowed = layer(dtype, biases), {"f8": 1e-13, "f4": 1e-6}[dtype]  # roundoff of the factors
    found = factorise_layer(METHODS[method], before, SIZES)
    wanted = blocks(method, dense(before))
    assert len(found.curves) == len(wanted)
    for block in range(len(wanted)):
        for option, choice in enumerate(choices(found, block)):
            got = blocks(method, multiplied_out(found.matrices(choice), before))
            for b, (a, other) in enumerate(zip(wanted, got, strict=True)):
                assert relative(a, other) ** 2 == pytest.approx(
                    found.curves[b].errors[choice[b]], rel=1e-6, abs=allowed
                ), f"option {option} of block {block}, seen at block {b}"


@pytest.mark.parametrize("method", METHODS)
def test_the_largest_options_are_the_model(method: str) -> None:
    before = layer(np.float32)
    found = factorise_layer(METHODS[method], before, SIZES)
    after = multiplied_out(found.matrices(last(found)), before)
    for a, b in zip(dense(before).operators(), after.operators(), strict=True):
        for one, other in zip(a, b, strict=True):
            assert relative(one, other) < 4e-7


@pytest.mark.parametrize("method", METHODS)
def test_arguments_stay_as_they_are_and_answers_repeat(method: str) -> None:
    before = layer(np.float32)
    with unchanged(*before.weights.values(), *before.biases.values()):
        found = factorise_layer(METHODS[method], before, SIZES)
        choices = [0] * len(found.curves), [k // 2 for k in last(found)], last(found)
        pieces = [piece for choice in choices for piece in found.matrices(choice)]
    again = factorise_layer(METHODS[method], before, SIZES)
    for one, other in zip(pieces, [own for choice in choices for own in again.matrices(choice)], strict=True):
        assert one.describe() == other.describe()
        for part, a in one.arrays.items():
            assert a.dtype == np.float32, f"{part} is {a.dtype}, the weights are float32"
            np.testing.assert_array_equal(a, other.arrays[part])


@pytest.mark.parametrize("scale", [1e-30, 1e25])
@pytest.mark.parametrize("method", METHODS)
def test_scale_changes_no_curve(method: str, scale: float) -> None:
    """Squares of such float32 leave their range."""
    ours, theirs = (factorise_layer(METHODS[method], layer(np.float32, scale=s), SIZES) for s in (1.0, scale))
    for a, b in zip(ours.curves, theirs.curves, strict=True):
        np.testing.assert_array_equal(a.costs, b.costs)
        np.testing.assert_allclose(a.errors, b.errors, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_zero_and_deficient_weights(method: str) -> None:
    zero = Projections({name: np.zeros((D, D), "f4") for name in NAMES}, {})
    one = Projections({name: np.outer(normal((D,), seed=1), normal((D,), seed=2)) for name in NAMES}, {})
    for before in (zero, one):
        found, warned = quietly(lambda before=before: factorise_layer(METHODS[method], before, SIZES))
        assert not warned
        for choice in ([0] * len(found.curves), last(found)):
            after = multiplied_out(found.matrices(choice), before)
            assert all(np.isfinite(w).all() for w in after.weights.values())
        for a, b in zip(dense(before).operators(), after.operators(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker"])
def test_what_is_zero_errs_nowhere(method: str) -> None:
    """So that no block that needs nothing is given numbers which another one needs."""
    zero = dict.fromkeys(NAMES if method == "tucker" else ("v",), np.zeros((D, D)))
    curves = factorise_layer(METHODS[method], Projections({**layer().weights, **zero}, {}), SIZES).curves
    of_zero = {"heads": slice(HEADS, None), "matrix": slice(2, 3), "ttm": slice(2, 3), "tucker": slice(None)}[method]
    assert curves[of_zero]
    for curve in curves[of_zero]:
        np.testing.assert_array_equal(curve.errors, 0)


# ------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("biases", ["qkvo", ""])
def test_every_rank_of_a_head_reaches_the_tail_of_its_singular_values(biases: str) -> None:
    before = layer(biases=biases, seed=3)
    found = Heads(before, SIZES)
    for curve, operator in zip(found.curves, blocks("heads", dense(before)), strict=True):
        s = np.linalg.svd(operator, compute_uv=False)
        assert len(curve.costs) == DH + 1
        for rank in range(DH + 1):
            assert curve.errors[rank] == pytest.approx(tail(s, rank) ** 2, rel=1e-9, abs=1e-14)


def test_ranks_are_each_heads_own() -> None:
    before = layer()
    found = Heads(before, SIZES)
    qk, vo = found.matrices([0, 4, 1, 2, 3, 0])
    assert (qk.of, qk.ranks) == ("qk", (0, 4, 1))
    assert (vo.of, vo.ranks) == ("vo", (2, 3, 0))
    assert qk.arrays["left"].shape == (D + 1, 5)
    assert vo.arrays["right"].shape == (5, D)


def test_a_bias_on_one_side_only() -> None:
    before = layer(biases="k")
    found = Heads(before, SIZES)
    after = multiplied_out(found.matrices(last(found)), before)
    assert set(after.biases) == {"k"}
    for a, b in zip(dense(before).operators()[0], after.operators()[0], strict=True):
        assert relative(a, b) < 1e-12


# --------------------------------------------------------------------------------------------------- matrix and ttm


def test_matrices_are_truncated_at_the_tail_of_their_singular_values() -> None:
    before = layer(seed=5)
    found = factorise_layer(METHODS["matrix"], before, SIZES)
    for name, curve in zip(NAMES, found.curves, strict=True):
        s = np.linalg.svd(before.weights[name], compute_uv=False)
        np.testing.assert_array_equal(curve.costs[:-1], 2 * D * np.arange(1, len(curve.costs)))
        assert curve.costs[-2] < D * D
        assert curve.costs[-1] == D * D
        for option, value in enumerate(curve.errors[:-1]):
            assert value == pytest.approx(tail(s, option + 1) ** 2, rel=1e-9, abs=1e-14)
        assert curve.errors[-1] == 0


def test_tt_matrices_are_sums_of_kronecker_products() -> None:
    """The spectrum is that of the weight with its legs paired, (i1 j1) (i2 j2)."""
    before = layer(seed=6)
    found = factorise_layer(METHODS["ttm"], before, SIZES)
    (m, n), (p, q) = split_evenly(D), split_evenly(D)
    assert (m, n) == (3, 4)
    for name, curve in zip(NAMES, found.curves, strict=True):
        paired = before.weights[name].reshape(m, n, p, q).transpose(0, 2, 1, 3).reshape(m * p, n * q)
        s = np.linalg.svd(paired, compute_uv=False)
        assert curve.costs[0] == m * p + n * q
        for option, value in enumerate(curve.errors[:-1]):
            assert value == pytest.approx(tail(s, option + 1) ** 2, rel=1e-9, abs=1e-14)


def test_a_kronecker_product_is_one_term() -> None:
    a, b = normal((3, 3), seed=1), normal((4, 4), seed=2)
    before = Projections(dict.fromkeys(NAMES, np.kron(a, b)), {})
    found = factorise_layer(METHODS["ttm"], before, SIZES)
    after = multiplied_out(found.matrices([0] * 4), before)
    for weight in after.weights.values():
        assert relative(np.kron(a, b), weight) < 1e-14


def test_only_prime_widths_are_refused() -> None:
    for d in range(2, 60):
        prime = all(d % k for k in range(2, d))
        reason = refuse_unsplittable(Sizes(1, 1, d))
        assert (reason is not None) == prime
        assert reason is None or f"{d} is prime" in reason


# ---------------------------------------------------------------------------------------------------- tucker and cp


def test_the_options_of_tucker_are_the_best_of_all_blocks() -> None:
    """No leading block of the core costs less and errs less than an option."""
    before = layer(seed=7)
    found = TuckerStack(before, SIZES)
    (curve,) = found.curves
    x = dense(before).stack()
    core = x
    for leg in range(4):
        u = np.linalg.svd(np.moveaxis(x, leg, 0).reshape(x.shape[leg], -1))[0]
        core = np.moveaxis(np.tensordot(core, u, axes=(leg, 0)), -1, leg)
    whole = np.sum(x**2)
    for ranks in itertools.product(*(range(1, n + 1) for n in x.shape)):
        cost = int(np.prod(ranks)) + int(np.dot(ranks, x.shape))
        if cost < x.size:
            error = 1 - np.sum(core[tuple(slice(r) for r in ranks)] ** 2) / whole
            at_most = int(np.searchsorted(curve.costs, cost, side="right")) - 1
            assert curve.errors[at_most] <= error + 1e-9, f"ranks {ranks} beat the option of {curve.costs[at_most]}"


def exact(rank: int) -> tuple[Projections, np.ndarray]:
    """A layer whose stack is a sum of so many products."""
    factors = [normal((n, rank), seed=20 + k) for k, n in enumerate((4, HEADS, D, DH))]
    x = np.einsum("ar,br,cr,dr->abcd", *factors)
    flat = [w.transpose(1, 0, 2).reshape(D, D) for w in x]
    return Projections(dict(zip(NAMES, (*flat[:3], flat[3].T), strict=True)), {}), x


@pytest.mark.parametrize(("method", "allowed"), [(TuckerStack, 1e-12), (CPStack, 1e-3)])
def test_a_stack_of_low_rank_is_found(method: Callable[..., Factorised], allowed: float) -> None:
    before, x = exact(2)
    np.testing.assert_array_equal(dense(before).stack(), x)
    found = method(before, SIZES)
    rank_two = {TuckerStack: 16 + 2 * (4 + HEADS + D + DH), CPStack: 2 * (1 + 4 + HEADS + D + DH)}[method]
    option = list(found.curves[0].costs).index(rank_two)
    after = multiplied_out(found.matrices([option]), before)
    assert relative(x, after.stack()) < allowed


def test_cp_says_nothing_of_convergence() -> None:
    """The report measures the error that was reached."""
    found = CPStack(layer(), SIZES)
    _, warned = quietly(lambda: found.matrices([3]))
    assert warned == []


def test_more_components_of_cp_err_less() -> None:
    before = layer(seed=8)
    found = CPStack(before, SIZES)
    x = dense(before).stack()
    errors = [relative(x, multiplied_out(found.matrices([option]), before).stack()) for option in (0, 4, 12)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.75 * errors[0]
