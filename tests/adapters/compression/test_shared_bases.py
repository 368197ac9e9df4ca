"""One basis of the inputs for queries and keys: the best of its rank on the inputs, and what its curve says."""

from __future__ import annotations

import numpy as np
import pytest
from compressed_folders import relative, tail
from oracles import normal
from tnlib_adapters.compression.calibration.whitening import Whitened
from tnlib_adapters.compression.methods.components import Inputs
from tnlib_adapters.compression.methods.tensor_stacks import SharedBases
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.projections import Projections, Sizes

D, HEADS, DH, N = 12, 4, 3, 300
KV = pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])


def sizes(kv_heads: int = HEADS) -> Sizes:
    return Sizes(n_layers=1, n_heads=HEADS, d_model=D, kv_heads=kv_heads, d_head=DH)


def layer(kv_heads: int = HEADS) -> tuple[Projections, Inputs, np.ndarray, np.ndarray]:
    """Weights of different sizes, biases, and inputs that lie mostly in a few directions."""
    widths = sizes(kv_heads).widths
    weights = {n: 10.0**k * normal((D, widths[n]), seed=k) for k, n in enumerate("qkv")}
    weights["o"] = normal((widths["o"], D), seed=4)
    biases = {name: normal((weights[name].shape[1],), seed=5) for name in "qkvo"}
    decay = 2.0 ** -np.arange(D)[:, None]
    x, y = (normal((N, D), seed=s) @ (normal((D, D), seed=s + 1) * decay) for s in (6, 8))
    wide = np.concatenate([x, np.ones((N, 1))], axis=1)
    return Projections(weights, biases), Inputs(wide.T @ wide, y.T @ y), x, y


def errors(before: Projections, after: Projections, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Squared relative errors on the inputs."""
    return {
        name: relative((read := y if name == "o" else x) @ weight, read @ after.weights[name]) ** 2
        for name, weight in before.weights.items()
    }


@KV
def test_curves_are_the_true_errors_on_the_inputs(kv_heads: int) -> None:
    before, seen, x, y = layer(kv_heads)
    found = Whitened("tucker", before, sizes(kv_heads), seen, turned=False)
    assert found.fixed == sum(bias.size for bias in before.biases.values())
    whole = [len(curve.costs) - 1 for curve in found.curves]
    for block, curve in enumerate(found.curves):
        for option in range(0, whole[block] + 1, 7 if block == 0 else 1):
            choice = [*whole[:block], option, *whole[block + 1 :]]
            pieces = found.matrices(choice)
            promised = sum(int(c.costs[k]) for c, k in zip(found.curves, choice, strict=True))
            assert sum(a.size for piece in pieces for a in piece.arrays.values()) == promised
            got = errors(before, expand(pieces, sizes(kv_heads)), x, y)
            measured = ((got["q"] + got["k"]) / 2, got["v"], got["o"])[block]
            assert measured == pytest.approx(curve.errors[option], rel=1e-6, abs=1e-12)


def test_the_basis_is_the_best_of_its_rank() -> None:
    """Where only the leg of the inputs is cut: Eckart and Young on both weights side by side, each of norm 1."""
    before, seen, x, y = layer()
    found = Whitened("tucker", before, sizes(), seen, turned=False)
    options = [found.matrices([k, 0, 0])[0] for k in range(len(found.curves[0].costs) - 1)]
    side_by_side = np.hstack([x @ before.weights[n] / np.linalg.norm(x @ before.weights[n]) for n in "qk"])
    s = np.linalg.svd(side_by_side, compute_uv=False)
    cut = [(k, shape[2]) for k, one in enumerate(options) if (shape := one.arrays["core"].shape)[:2] == (2, HEADS)]
    cut = [(k, r) for k, r in cut if options[k].arrays["core"].shape[3] == DH]
    assert len(cut) > 2
    for option, rank in cut:
        got = errors(before, before.updated(expand([options[option]], sizes())), x, y)
        assert (got["q"] + got["k"]) / 2 == pytest.approx(tail(s, rank) ** 2, rel=1e-6)


@KV
def test_nothing_truncated_is_the_model(kv_heads: int) -> None:
    before, seen, _, _ = layer(kv_heads)
    for found in (
        SharedBases(before, sizes(kv_heads)),
        Whitened("tucker", before, sizes(kv_heads), seen, turned=False),
    ):
        pieces = found.matrices([len(curve.costs) - 1 for curve in found.curves])
        for name, weight in expand(pieces, sizes(kv_heads)).weights.items():
            assert relative(before.weights[name], weight) < 1e-14


def test_weights_of_zero() -> None:
    zero = Projections({name: np.zeros((D, D)) for name in "qkvo"}, {})
    _, seen, _, _ = layer()
    found = Whitened("tucker", zero, sizes(), seen, turned=False)
    assert not any(weight.any() for weight in expand(found.matrices([0, 0, 0]), sizes()).weights.values())
