"""Products stored without the numbers that their gauge frees."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tnlib_adapters.factors.config_section import descriptions
from tnlib_adapters.factors.expansion import expand
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.interpolative import pack, pivot_rows, unpack
from tnlib_adapters.factors.projections import Sizes

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
    assert np.abs(rest).max(initial=0.0) <= 2 + 100 * EPS
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


def packed(name: str, rank: int, rows: int = D, **more: object) -> tuple[FactoredMatrix, np.ndarray]:
    """A piece of a made-up projection, and the product it stands for."""
    rng = np.random.default_rng(rank)
    left, right = rng.standard_normal((rows, rank)), rng.standard_normal((rank, D))
    rest, new, chosen = pack(left, right)
    arrays = {"left": rest, "right": new, **more.pop("arrays", {})}  # type: ignore[dict-item]
    return FactoredMatrix("interpolative", name, arrays, rows=chosen, **more), left @ right  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1, 5, D])
def test_pieces_expand_to_the_products_they_were_made_from(rank):
    bias = np.arange(1.0, D + 1)
    pieces, wanted = zip(
        packed("q", rank, rows=D + 1, biases="q"),
        packed("k", rank, biases="k"),
        packed("v", rank),
        packed("o", rank, biases="o", arrays={"bias": bias}),
        strict=True,
    )
    found = expand(pieces, SIZES)
    np.testing.assert_allclose(found.weights["q"], wanted[0][:D], atol=1e-13)
    np.testing.assert_allclose(found.biases["q"], wanted[0][D], atol=1e-13)
    for name, product in zip("kvo", wanted[1:], strict=True):
        np.testing.assert_allclose(found.weights[name], product, atol=1e-13)
    assert not found.biases["k"].any()
    assert "v" not in found.biases
    np.testing.assert_array_equal(found.biases["o"], bias)


def test_a_piece_is_read_as_it_was_described():
    piece, _ = packed("q", 4, rows=D + 1, biases="q")
    piece = replace(piece, module="attention")
    section = {"quant_method": "tnlib", "version": 1, "layers": [[piece.describe().to_json()]]}
    read = descriptions({"quantization_config": section}, ["attention"], SIZES)
    assert read is not None
    assert read[0].read(piece.arrays.__getitem__) == piece


@pytest.mark.parametrize("rows", [(0, 1, 2), (0, 1, 2, 99), (0, 1, 2, 3, 4)])
def test_rows_that_do_not_fit_are_refused(rows):
    piece, _ = packed("q", 4)
    section = {"quant_method": "tnlib", "version": 1, "layers": [[replace(piece, rows=rows).describe().to_json()]]}
    with pytest.raises(FileFormatError, match="do not make a layer of kind 'interpolative'"):
        descriptions({"quantization_config": section}, ["attention"], SIZES)


@oracles.each_dtype
@pytest.mark.parametrize(("m", "r"), [(12, 3), (5, 5), (7, 1), (200, 20)])
def test_pivot_rows_are_independent(dtype: np.dtype, m: int, r: int) -> None:
    a = oracles.normal((m, r), dtype)
    with oracles.unchanged(a):
        rows = pivot_rows(a)
    assert len(set(rows.tolist())) == r
    assert np.linalg.cond(oracles.wide(a)[rows]) < 1e4
    assert pivot_rows(np.concatenate([a, a[:, :1]], axis=1)[: m + 1]) is None or m == r
    assert pivot_rows(0 * a) is None
