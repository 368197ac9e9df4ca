"""Products stored without the numbers that their gauge frees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tnlib_adapters.checkpoints.factored import Piece, descriptions, expand
from tnlib_adapters.checkpoints.pivoted import pack, unpack
from tnlib_adapters.checkpoints.projections import Sizes

from tnlib import FileFormatError

EPS = np.finfo(float).eps


@given(st.integers(1, 12), st.integers(0, 6), st.integers(1, 9), st.floats(-9, 9), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_a_packed_product_is_the_product_in_fewer_numbers(m, r, n, power, seed):
    rng = np.random.default_rng(seed)
    r = min(r, m)
    left, right = rng.standard_normal((m, r)) * 10.0**power, rng.standard_normal((r, n))
    rest, new_right, rows = pack(left, right)
    assert rest.size + new_right.size == left.size + right.size - r * r
    assert len(set(rows)) == r
    assert list(rows) == sorted(rows)
    assert np.abs(rest).max(initial=0.0) <= 1.1 + 100 * EPS
    size = np.linalg.norm(left) * np.linalg.norm(right)
    assert np.linalg.norm(unpack(rest, rows) @ new_right - left @ right) <= 100 * EPS * size


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_dependent_columns_are_not_stored(rank):
    rng = np.random.default_rng(rank)
    left = rng.standard_normal((8, rank)) @ rng.standard_normal((rank, 4))
    right = rng.standard_normal((4, 5))
    rest, new_right, rows = pack(left, right)
    assert rest.shape == (8 - rank, rank)
    assert np.linalg.norm(unpack(rest, rows) @ new_right - left @ right) <= 1e-13


D, HEADS, DH = 12, 3, 4
SIZES = Sizes(1, HEADS, D)
RANKS = (1, 4, 0)


def packed(kind: str, rng: np.random.Generator, extra: int, **more: object) -> tuple[Piece, list[np.ndarray]]:
    """A piece of made-up heads, and the product of every head."""
    lefts, rights, rows, products = [], [], [], []
    for r in RANKS:
        left, right = rng.standard_normal((D + extra, r)), rng.standard_normal((r, D))
        rest, new, chosen = pack(left, right)
        lefts.append(rest.ravel())
        rights.append(new)
        rows.append(chosen)
        products.append(left @ right)
    arrays = {"left": np.concatenate(lefts), "right": np.concatenate(rights), **more.pop("arrays", {})}  # type: ignore[dict-item]
    return Piece("pivoted", kind, arrays, RANKS, tuple(rows), **more), products  # type: ignore[arg-type]


def heads(weight: np.ndarray) -> np.ndarray:
    return weight.reshape(*weight.shape[:-1], HEADS, DH)


def test_pieces_expand_to_the_operators_they_were_made_from():
    rng = np.random.default_rng(0)
    bias = rng.standard_normal(D)
    qk, of_qk = packed("qk", rng, 1, biases="qk")
    vo, of_vo = packed("vo", rng, 0, biases="vo", arrays={"bias": bias})
    found = expand([qk, vo], SIZES)
    w_q = np.concatenate([found.weights["q"], found.biases["q"][None]])
    for h in range(HEADS):
        np.testing.assert_allclose(heads(w_q)[:, h] @ heads(found.weights["k"])[:, h].T, of_qk[h], atol=1e-13)
        own = found.weights["o"].reshape(HEADS, DH, D)[h]
        np.testing.assert_allclose(heads(found.weights["v"])[:, h] @ own, of_vo[h], atol=1e-13)
    assert not found.biases["k"].any()
    assert not found.biases["v"].any()
    np.testing.assert_array_equal(found.biases["o"], bias)


def test_a_piece_is_read_as_it_was_described():
    piece, _ = packed("qk", np.random.default_rng(0), 1, biases="qk")
    section = {"quant_method": "tnlib", "version": 1, "layers": [[piece.describe()]]}
    read = descriptions({"quantization_config": section})
    assert read is not None
    assert Piece.read(read[0][0], piece.arrays.__getitem__) == piece


@pytest.mark.parametrize(
    "change", [{"ranks": (1, 3, 0)}, {"rows": ((0,), (1, 2, 3), ())}, {"rows": ((0,), (1, 2, 3, 99), ())}]
)
def test_pieces_that_do_not_fit_together_are_refused(change):
    from dataclasses import replace

    piece, _ = packed("qk", np.random.default_rng(0), 1, biases="qk")
    with pytest.raises(FileFormatError, match="cannot be multiplied out as 'pivoted'"):
        expand([replace(piece, **change)], SIZES)
