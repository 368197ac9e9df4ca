"""Factors in integers of 2 to 8 bits: their errors, their bytes, on disk, in numpy and in a running model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import change_tensors
from compressed_folders import read_config
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from oracles import refused
from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, rounded
from tnlib_adapters.factors.integers import BITS, IntegerFormat, Integers, int8_format, pack, unpack
from tnlib_adapters.factors.rounding import round_to_nearest
from tnlib_adapters.files.safetensors_file import from_bf16, to_bf16

from tnlib import ArgumentError, FileFormatError

pytestmark = pytest.mark.usefixtures("without_pictures")
PACKED = [bits for bits in BITS if bits < 8]


def weights(folder: Path) -> list[Any]:
    checkpoint = open_checkpoint(folder)
    return [checkpoint.projections(layer).weights for layer in range(checkpoint.n_layers)]


def round_slices(a: np.ndarray, leg: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes in 8 bits, and a scale for every slice along a leg."""
    in_int8 = round_to_nearest(a, IntegerFormat(8, tuple(k for k in range(a.ndim) if k != leg)))
    return in_int8.codes, in_int8.scales


@given(
    st.data(),
    array_shapes(min_dims=2, max_dims=4, max_side=5),
)
def test_no_entry_is_off_by_more_than_half_a_step(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a = data.draw(arrays(np.float64, shape, elements=st.floats(-1e30, 1e30, allow_subnormal=False)))
    leg = data.draw(st.integers(0, a.ndim - 1))
    q, scale = round_slices(a, leg)
    assert q.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.size == shape[leg]
    largest = np.abs(np.moveaxis(a, leg, 0).reshape(shape[leg], -1)).max(axis=1)
    step = largest.reshape(scale.shape) / 127
    assert np.all(np.abs(q * scale.astype(np.float64) - a) <= 0.5001 * step + 1e-37)


def test_slices_do_not_see_each_other() -> None:
    """A column a million times larger than the next costs the next nothing."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((50, 3))
    q, _ = round_slices(a * [1, 1e6, 1e-6], 1)
    plain, _ = round_slices(a, 1)
    assert np.array_equal(q, plain)


def test_every_component_of_two_factors_has_a_scale() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.standard_normal((6, 3)) * [1, 1e3, 1e-3], rng.standard_normal((3, 5)) * [[1e-2], [1], [1e2]]
    arrays = {"left": left, "right": right, "bias": np.ones(5)}
    matrix = rounded(FactoredMatrix("low_rank", "q", arrays), 8)
    assert matrix.describe().to_json()["scales"] == {"left": [1, 3], "right": [3, 1]}
    wide = matrix.arrays
    assert np.all(np.abs(wide["left"] - left) <= 0.501 * np.abs(left).max(axis=0) / 127)
    assert np.all(np.abs(wide["right"] - right) <= 0.501 * np.abs(right).max(axis=1, keepdims=True) / 127)
    assert wide["bias"] is arrays["bias"]


def as_bits(codes: np.ndarray, bits: int) -> list[int]:
    """Return the bytes of the codes of one row, by the definition of the bit stream."""
    stream = sum(int(code) << (bits * k) for k, code in enumerate(codes))
    return list(stream.to_bytes(-(-len(codes) // 8) * bits, "little"))


@given(st.data(), st.sampled_from(PACKED), array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=11))
def test_packed_codes_are_a_bit_stream_and_come_back(data: st.DataObject, bits: int, shape: tuple[int, ...]) -> None:
    codes = data.draw(arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    axis = data.draw(st.integers(0, codes.ndim - 1))
    packed = pack(codes, bits, axis)
    assert packed.shape == IntegerFormat(bits, axis).stored_shape(shape)
    rows = np.moveaxis(codes, axis, -1)
    for index in np.ndindex(rows.shape[:-1]):
        assert packed[index].tolist() == as_bits(rows[index], bits)
    np.testing.assert_array_equal(unpack(packed, bits, axis, shape[axis]), codes)


def test_a_code_too_large_is_not_packed() -> None:
    with refused(ArgumentError, "pack: codes must be below 8 for 3 bits, got 8"):
        pack(np.array([8], np.uint8), 3, 0)


@given(
    st.data(),
    st.sampled_from(PACKED),
    array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9),
    st.integers(0, 10),
    st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_rounding_clips_only_where_that_is_better(
    data: st.DataObject, bits: int, shape: tuple[int, ...], group: int, unit: float
) -> None:
    seed, axis = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(0, len(shape) - 1))
    rng = np.random.default_rng(seed)
    a = (unit * rng.standard_normal(shape) * rng.choice([0, 1, 1e-4, 100], shape)).astype(np.float32)
    form = IntegerFormat(bits, axis, group)
    best, plain = (round_to_nearest(a, form, search=search) for search in (True, False))
    assert best.scales.shape == form.scale_shape(shape)
    np.testing.assert_array_equal(from_bf16(to_bf16(best.scales)), best.scales)

    sizes = form.group_sizes(shape[axis])
    if a.size == 0:
        return
    ends = np.cumsum([0, *sizes])[:-1]
    of_best, of_plain = (
        np.add.reduceat(((rounded.values(np.float64) - a) / unit) ** 2, ends, axis) for rounded in (best, plain)
    )
    assert np.all(of_best <= of_plain * (1 + 1e-5) + 1e-12)
    largest = np.maximum.reduceat(np.abs(a), ends, axis)
    step = 2 * largest.astype(np.float64) / (2**bits - 1)  # min-max rounding is off by half of it at most
    limit = np.repeat(step, sizes, axis)
    assert np.all(np.abs(plain.values(np.float64) - a) <= 0.51 * limit + 2**-8 * np.abs(a))
    assert not best.values()[a == 0][np.repeat(largest, sizes, axis)[a == 0] == 0].any()


@pytest.mark.parametrize("bits", PACKED)
def test_codes_are_the_nearest_levels_of_the_rounded_scale(bits: int) -> None:
    a = np.random.default_rng(3).standard_normal((130, 3)).astype(np.float32)
    rounded_a = round_to_nearest(a, IntegerFormat(bits, 0, 64))
    assert rounded_a.scales.shape == (3, 3)
    levels = rounded_a.scales[..., None] * (np.arange(2**bits) - (2**bits - 1) / 2)  # group, column, level
    nearest = np.abs(np.repeat(levels, [64, 64, 2], axis=0) - a[..., None]).argmin(axis=-1)
    np.testing.assert_array_equal(rounded_a.codes, nearest)
    assert (rounded_a.codes.min(), rounded_a.codes.max()) == (0, 2**bits - 1)
    np.testing.assert_array_equal(
        rounded_a.values(), np.take_along_axis(np.repeat(levels, [64, 64, 2], axis=0), nearest[..., None], -1)[..., 0]
    )


@pytest.mark.parametrize("bits", PACKED)
def test_clipping_gains_on_normal_numbers(bits: int) -> None:
    a = np.random.default_rng(4).standard_normal((640, 20))
    best, plain = (round_to_nearest(a, IntegerFormat(bits, 0, 64), search=search) for search in (True, False))
    off, plain_off = (np.linalg.norm(rounded.values() - a) / np.linalg.norm(a) for rounded in (best, plain))
    assert off < {2: 0.70, 3: 0.87, 4: 0.95, 5: 0.98, 6: 0.99}[bits] * plain_off
    # the smallest errors of uniform grids for normal numbers: 0.345, 0.193, 0.107, 0.059, 0.032 (Max 1960)
    assert off < {2: 0.345, 3: 0.194, 4: 0.107, 5: 0.059, 6: 0.032}[bits]


@pytest.mark.parametrize("group", [0, 4])
def test_eight_bits_round_as_slices_do(group: int) -> None:
    a = np.random.default_rng(5).standard_normal((10, 3))
    rounded_a = round_to_nearest(a, IntegerFormat(8, 0, group))
    parts = [round_slices(part, 1) for part in (np.split(a, [4, 8]) if group else [a])]
    np.testing.assert_array_equal(rounded_a.codes, np.concatenate([codes for codes, _ in parts]))
    np.testing.assert_array_equal(rounded_a.scales, np.concatenate([scales for _, scales in parts]))
    core = np.random.default_rng(6).standard_normal((2, 3, 4, 5))
    np.testing.assert_array_equal(
        round_to_nearest(core, int8_format("core0", core.shape)).codes, round_slices(core, 3)[0]
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: IntegerFormat(7, 0), "bits must be one of 2, 3, 4, 5, 6, 8, got 7"),
        (lambda: IntegerFormat(4, -1), "axis and group must not be negative, got -1"),
        (lambda: IntegerFormat(4, (0, 1)), "axis must be one number for 4 bits"),
        (lambda: Integers(np.zeros(9, np.uint8), np.zeros(1, np.float32), IntegerFormat(4, 0, 4)), "scales of shape"),
        (lambda: Integers(np.zeros(9, np.int8), np.zeros(1, np.float32), IntegerFormat(4, 0)), "codes must be uint8"),
    ],
)
def test_formats_that_do_not_exist(make: Any, said: str) -> None:
    with refused(ArgumentError, said):
        make()


def test_scales_beyond_bfloat16_are_not_written() -> None:
    integers = Integers(np.zeros((4, 2), np.uint8), np.full((1, 2), 1.001, np.float32), IntegerFormat(4, 0))
    matrix = FactoredMatrix("dense", "q", {"weight": np.zeros((4, 2))}).with_integers({"weight": integers})
    with refused(ArgumentError, "the scales of 'weight' must be values that"):
        matrix.parts()


def test_bits_are_those_of_the_stored_parts() -> None:
    rng = np.random.default_rng(7)
    parts = {"left": rng.standard_normal((70, 5)), "right": rng.standard_normal((5, 9)), "bias": np.ones(9)}
    matrix = FactoredMatrix("interpolative", "", parts, rows=(3, 1, 4, 2, 0))
    assert matrix.describe().n_bits(16) == 16 * (350 + 45 + 9)
    for bits in BITS:
        stored = rounded(matrix, bits).parts()
        n_bits = sum(8 * part.nbytes for name, part in stored.items() if name != "bias") + 9 * 16
        assert rounded(matrix, bits).describe().n_bits(16) == n_bits
    assert rounded(matrix, 3).n_parameters == matrix.n_parameters


def test_axes_of_groups() -> None:
    def axes(matrix: FactoredMatrix, **options: Any) -> dict[str, Any]:
        formats = rounded(matrix, 4, **options).describe().formats
        return {part: form.axis for part, form in formats.items()}

    two = {"left": np.ones((6, 3)), "right": np.ones((3, 8))}
    assert axes(FactoredMatrix("low_rank", "q", two | {"bias": np.ones(8)})) == {"left": 0, "right": 0}
    assert axes(FactoredMatrix("low_rank", "", two), by_row=True) == {"left": 1, "right": 0}
    assert axes(FactoredMatrix("dense", "", {"whole": np.ones((6, 3))}), by_row=True) == {"whole": 1}
    assert axes(FactoredMatrix("dense", "q", {"weight": np.ones((6, 3))})) == {"weight": 0}
    assert axes(FactoredMatrix("heads", "qk", two, (1, 2))) == {"left": 0, "right": 1}  # keys are x @ right.T
    assert axes(FactoredMatrix("heads", "vo", two, (1, 2))) == {"left": 0, "right": 0}
    cores = {"core0": np.ones((1, 4, 3, 5)), "core1": np.ones((5, 2, 3, 1))}
    assert axes(FactoredMatrix("ttm", "q", cores)) == {"core0": 1, "core1": 2}
    tucker = {"core": np.ones((2, 2, 7, 3)), "factor0": np.ones((4, 2)), "factor1": np.ones((2, 7))}
    assert axes(FactoredMatrix("tucker", "qkvo", tucker)) == {"core": 2, "factor0": 0, "factor1": 1}


@pytest.mark.parametrize("bits", BITS)
def test_a_description_reads_what_it_wrote(bits: int) -> None:
    rng = np.random.default_rng(8)
    parts = {"left": rng.standard_normal((70, 5)), "right": rng.standard_normal((5, 9))}
    matrix = rounded(FactoredMatrix("low_rank", "q", parts), bits)
    description = matrix.describe()
    dtypes = {name: dtype for name, (dtype, _) in description.tensors.items()}
    stored = {name: from_bf16(part) if dtypes[name] == "BF16" else part for name, part in matrix.parts().items()}
    assert {name: part.shape for name, part in stored.items()} == {
        name: shape for name, (_, shape) in description.tensors.items()
    }
    again = description.read(stored.__getitem__)
    for part, values in matrix.arrays.items():
        np.testing.assert_array_equal(again.arrays[part], values)
        np.testing.assert_array_equal(again.integers[part].codes, matrix.integers[part].codes)
    entry = description.to_json()
    assert ("scales" in entry) == (bits == 8)
    assert ("integers" in entry) == (bits < 8)


def test_the_whole_of_a_matrix_in_int8_is_plain_rounding(tmp_path: Path) -> None:
    compress(builtin_path(), tmp_path / "out", Budget(keep=1, store="int8"), method="matrix", what="attention")
    for before, after in zip(weights(builtin_path()), weights(tmp_path / "out"), strict=True):
        for name, weight in before.items():
            q, scale = round_slices(weight, 1)  # (in, out): a scale for every output
            np.testing.assert_allclose(after[name], q * scale.astype(float), rtol=1e-6)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with refused(ArgumentError, "Budget: store must be one of float, int8, int4, int3, int2, got 'int5'"):
        compress(builtin_path(), tmp_path / "out", Budget(keep=0.5, store="int5"), what="attention")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("store", ["int8", "int4", "int3", "int2"])
def test_bytes_of_a_folder_are_the_bits_of_its_descriptions(store: str, tmp_path: Path) -> None:
    report = compress(builtin_path(), tmp_path / "out", Budget(keep=0.5, store=store), method="ttm", what="attention")
    described = open_checkpoint(tmp_path / "out").factored
    assert described is not None
    biases = 2 * 4 * 64  # which no factor holds
    n_bits = sum(description.n_bits(32) for description in described) + 32 * biases
    assert 8 * report.bytes_after["attention"] == n_bits


def test_two_bits_are_written_where_they_are_said_to_be(tmp_path: Path) -> None:
    """The layout of the page on the format, read without this library's own unpacking."""
    out = tmp_path / "out"
    compress(builtin_path(), out, Budget(keep=1, store="int2"), method="matrix", what="attention")
    entry = next(e for e in read_config(out)["quantization_config"]["layers"][0] if e["of"] == "k")
    assert entry["integers"] == {"weight": {"bits": 2, "axis": 0, "group": 64}}
    tensors = open_checkpoint(out).folder.tensors
    stored, scale = (tensors[n] for n in sorted(n for n in tensors if "0" in n and ".tnlib.k_weight" in n))
    assert (stored.dtype, stored.shape, scale.dtype, scale.shape) == ("U8", (64, 16), "BF16", (1, 64))
    streams = [int.from_bytes(row.tobytes(), "little") for row in stored.read()]
    codes = np.array([[stream >> (2 * k) & 3 for stream in streams] for k in range(64)])
    weight = open_checkpoint(out).projections(0).weights["k"]
    np.testing.assert_array_equal(weight, scale.read() * (codes - 1.5))


def test_a_scale_out_of_range_is_refused_by_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(builtin_path(), source)

    def enlarge(tensors: dict[str, Any]) -> None:
        name = "layers.0.attention.query.weight"
        tensors[name] = tensors[name].astype(np.float64) * 1e100

    change_tensors(source, enlarge)
    with refused(ArgumentError, "q_weight_scale' would hold inf, out of range for its dtype BF16"):
        compress(source, tmp_path / "out", Budget(keep=1, store="int4"), method="matrix", what="attention")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 7},
        {"bits": "4"},
        {"bits": True},
        {"axis": 2},
        {"axis": [0, 1]},
        {"group": -64},
        {"groups": 64},
    ],
)
def test_damaged_formats_are_refused(change: dict[str, Any], packed_folder: Path) -> None:
    config = read_config(packed_folder)
    config["quantization_config"]["layers"][0][0]["integers"]["left"] |= change
    (packed_folder / "config.json").write_text(json.dumps(config))
    with refused(FileFormatError, "open_checkpoint: the factors of", "are damaged"):
        open_checkpoint(packed_folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entry: entry["integers"].clear(), "are damaged"),
        (lambda entry: entry.update(integers=[4]), "are damaged"),
        (lambda entry: entry.update(integers=None), "must be of F16, BF16, F32, F64, got U8"),
        (lambda entry: entry["integers"].update(middle={"bits": 4, "axis": 0, "group": 64}), "are damaged"),
        (lambda entry: entry.update(scales={"left": [1, entry["shapes"]["left"][1]]}), "are damaged"),
        (lambda entry: entry["integers"]["left"].update(bits=3), "must have shape"),
        (lambda entry: entry["integers"]["left"].update(axis=1), "must have shape"),
        (lambda entry: entry["integers"]["left"].update(group=16), "must have shape"),
        (lambda entry: entry["integers"]["left"].update(bits=8), "must be of I8, got U8"),
        (lambda entry: entry["integers"].pop("left"), "must be of F16, BF16, F32, F64, got U8"),
        (lambda entry: entry["shapes"]["left"].__setitem__(0, 2**59), "do not make a layer"),
    ],
)
def test_formats_that_contradict_the_tensors_are_refused(change: Any, said: str, packed_folder: Path) -> None:
    config = read_config(packed_folder)
    change(config["quantization_config"]["layers"][0][0])
    (packed_folder / "config.json").write_text(json.dumps(config))
    with refused(FileFormatError, said):
        open_checkpoint(packed_folder)


@pytest.fixture
def packed_folder(tmp_path: Path) -> Path:
    compress(builtin_path(), tmp_path / "packed", Budget(keep=0.5, store="int4"), what="attention")
    return tmp_path / "packed"


def test_damaged_scales_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(builtin_path(), out, Budget(keep=0.5, store="int8"), what="attention")
    config = read_config(out)
    change_tensors(out, lambda tensors: tensors.pop(next(name for name in tensors if name.endswith("left_scale"))))
    with refused(FileFormatError, "left_scale", "is missing"):
        open_checkpoint(out)
    piece = config["quantization_config"]["layers"][0][0]
    scales = piece.pop("scales")
    for damaged, words in (
        ({"scales": scales | {"left": [7, 7]}}, "are damaged"),
        ({"scales": {}}, "are damaged"),
        ({}, "must be of F16, BF16, F32, F64, got I8"),
    ):
        config["quantization_config"]["layers"][0][0] = piece | damaged
        (out / "config.json").write_text(json.dumps(config))
        with refused(FileFormatError, words):
            open_checkpoint(out)
