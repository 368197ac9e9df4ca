"""Safetensors files: what the safetensors package writes is read, what is written it reads, and damage is refused."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from checkpoint_folders import entry, raw_file
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import refused
from tnlib_adapters.files.safetensors_file import STORED_AS, Entry, encode, read_header, write_tensor_file

from tnlib import FileFormatError

NATIVE = [name for name in STORED_AS if name != "BF16"]


def example(dtype: str, shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 100, size=shape)
    return encode(values if dtype != "BOOL" else values % 2, dtype)


def write(file: Path, *entries: Entry, **metadata: str) -> Path:
    assert list(write_tensor_file(file, entries, metadata)) == [entry.name for entry in entries]
    return file


# --------------------------------------------------------------------------------------------- reading and writing


@pytest.mark.parametrize("dtype", NATIVE)
def test_what_is_written_the_safetensors_package_reads(dtype: str, tmp_path: Path) -> None:
    x = example(dtype)
    file = write(tmp_path / "x.safetensors", Entry("x", dtype, x), Entry("y", dtype, x[1]), format="pt")
    found = safetensors.numpy.load_file(file)
    assert found["x"].dtype == x.dtype
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["y"], x[1])
    with safetensors.safe_open(file, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", NATIVE)
def test_what_the_safetensors_package_writes_is_read(dtype: str, tmp_path: Path) -> None:
    x = example(dtype)
    safetensors.numpy.save_file({"x": x, "y": x[:, 0].copy()}, tmp_path / "x.safetensors", metadata={"a": "b"})
    tensors, metadata = read_header(tmp_path / "x.safetensors")
    assert metadata == {"a": "b"}
    assert tensors["x"].dtype == dtype
    assert tensors["x"].size == 12
    np.testing.assert_array_equal(tensors["x"].read_stored(), x)
    np.testing.assert_array_equal(tensors["y"].read(), x[:, 0])
    assert tensors["x"].read().dtype == (np.float32 if dtype == "F16" else x.dtype)


def test_bf16_is_written_and_read_as_torch_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    theirs = torch.from_numpy(x).to(torch.bfloat16)
    file = write(tmp_path / "ours.safetensors", Entry("x", "BF16", encode(x, "BF16")))
    assert torch.equal(load_file(file)["x"], theirs)
    save_file({"x": theirs}, tmp_path / "theirs.safetensors")
    tensors, _ = read_header(tmp_path / "theirs.safetensors")
    np.testing.assert_array_equal(tensors["x"].read(), theirs.float().numpy())
    np.testing.assert_array_equal(tensors["x"].read_stored(), encode(x, "BF16"))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_scalars_and_empty_tensors_keep_their_shape(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    x = encode(np.ones(shape), dtype)
    tensors, _ = read_header(write(tmp_path / "x.safetensors", Entry("x", dtype, x), Entry("y", dtype, x)))
    for name in ("x", "y"):
        assert tensors[name].shape == shape
        np.testing.assert_array_equal(tensors[name].read(), np.ones(shape))


def test_strided_values_are_written_row_by_row(tmp_path: Path) -> None:
    x = np.arange(12.0).reshape(3, 4).T[::2]
    tensors, _ = read_header(write(tmp_path / "x.safetensors", Entry("x", "F64", x)))
    np.testing.assert_array_equal(tensors["x"].read(), x)


def test_tensors_of_another_file_are_copied_bit_for_bit(tmp_path: Path) -> None:
    bits = np.arange(2**16, dtype=np.uint16)  # NaN and inf among them
    first, _ = read_header(write(tmp_path / "first.safetensors", Entry("x", "BF16", bits)))
    again, _ = read_header(write(tmp_path / "again.safetensors", Entry("x", "BF16", first["x"])))
    np.testing.assert_array_equal(again["x"].read_stored(), bits)


def test_nothing_is_written_before_the_writer_is_iterated(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "x.safetensors", [Entry("x", "F32", example("F32"))], {})
    assert not list(tmp_path.iterdir())


def test_data_start_at_a_multiple_of_eight_bytes(tmp_path: Path) -> None:
    for name in ("x", "xy", "xyz"):
        tensors, _ = read_header(write(tmp_path / "x.safetensors", Entry(name, "F64", np.ones(1))))
        assert tensors[name].begin % 8 == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
def test_nan_and_inf_are_refused_by_name_and_place(dtype: str, bad: float, tmp_path: Path) -> None:
    x = np.ones((2, 3))
    x[1, 2] = bad
    tensors, _ = read_header(write(tmp_path / "x.safetensors", Entry("h.0.weight", dtype, encode(x, dtype))))
    with refused(FileFormatError, "'h.0.weight'", "x.safetensors", "(1, 2)", str(bad)):
        tensors["h.0.weight"].read_finite()


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "x.safetensors", Entry("x", "F32", example("F32")))
    tensors, _ = read_header(file)
    file.write_bytes(file.read_bytes()[:-1])
    with refused(FileFormatError, "x.safetensors", "'x'", "cut short"):
        tensors["x"].read()


# --------------------------------------------------------------------------------------------------- damaged files

F32 = entry("F32", [2], 0, 8)

DAMAGED = {
    "one byte too few": ({"x": F32}, bytes(7), ("'x'", "ends at byte")),
    "overlap": ({"x": F32, "y": entry("F32", [2], 4, 12)}, bytes(12), ("'y'", "overlaps", "'x'")),
    "beyond the end": ({"x": entry("F32", [2], 800, 808)}, bytes(8), ("'x'", "ends at byte")),
    "before the start": ({"x": entry("F32", [2], -8, 0)}, bytes(8), ("'x'", "-8")),
    "backwards": ({"x": entry("F32", [2], 8, 0)}, bytes(8), ("'x'", "8 bytes", "-8")),
    "more numbers than bytes": ({"x": entry("F32", [3], 0, 8)}, bytes(8), ("'x'", "12 bytes", "has 8")),
    "fewer numbers than bytes": ({"x": entry("F32", [1], 0, 8)}, bytes(8), ("'x'", "4 bytes", "has 8")),
    "unknown dtype": ({"x": entry("F99", [2], 0, 8)}, bytes(8), ("'x'", "F99", "BF16")),
    "dtype that is a list": ({"x": entry(["F32"], [2], 0, 8)}, bytes(8), ("'x'", "F32")),
    "negative size": ({"x": entry("F32", [-2], 0, 8)}, bytes(8), ("'x'", "-2")),
    "size that is no integer": ({"x": entry("F32", [2.0], 0, 8)}, bytes(8), ("'x'", "2.0")),
    "size that is a truth": ({"x": entry("F32", [2, True], 0, 8)}, bytes(8), ("'x'", "True")),
    "shape that is no list": ({"x": entry("F32", 2, 0, 8)}, bytes(8), ("'x'", "2")),
    "empty, but too large for any array": ({"x": entry("F32", [0, 2**40, 2**40], 0, 0)}, b"", ("'x'", "shape")),
    "empty, with too many legs": ({"x": entry("F32", [0] * 99, 0, 0)}, b"", ("'x'", "shape")),
    "offset of thousands of digits": ({"x": entry("F32", [0], 10**4299, 10**4299)}, b"", ("no JSON", "4300 digits")),
    "offsets missing": ({"x": {"dtype": "F32", "shape": [2]}}, bytes(8), ("'x'", "data_offsets")),
    "three offsets": ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, bytes(8), ("'x'", "two")),
    "entry that is no object": ({"x": "F32"}, bytes(8), ("'x'",)),
    "metadata that are no object": ({"__metadata__": 1}, b"", ("metadata",)),
    "metadata that are no strings": ({"__metadata__": {"version": 1}}, b"", ("metadata",)),
    "list": ([1, 2], b"", ("no JSON object",)),
    "no JSON": (b"{", b"", ("no JSON",)),
    "nested beyond all measure": (b"[" * 100_000, b"", ("no JSON",)),
    "UTF-16": (json.dumps({"x": F32}).encode("utf-16-le"), bytes(8), ("no JSON",)),
    "UTF-8 with a mark": (json.dumps({"x": F32}).encode("utf-8-sig"), bytes(8), ("no JSON",)),
    "lone surrogate as a name": (b'{"\\ud800": %s}' % json.dumps(F32).encode(), bytes(8), ("no JSON", "surrogates")),
    "lone surrogate in the metadata": (b'{"__metadata__": {"a": "\\udc80"}}', b"", ("no JSON", "surrogates")),
    "NaN": ({"x": F32 | {"scale": float("nan")}}, bytes(8), ("no JSON", "NaN")),
    "number beyond all floats": (b'{"x": 1e999}', bytes(8), ("no JSON", "1e999")),
    "minus zero": (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-0, 8]}}', bytes(8), ("'x'", "-0.0")),
    "nested as deep as safetensors refuses": (b'{"x": %s}' % (b"[" * 127 + b"]" * 127), b"", ("no JSON", "nested")),
    "duplicate name": (b'{"x": {}, "x": {}}', b"", ("duplicate", "'x'")),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_refused(case: str, tmp_path: Path) -> None:
    header, data, words = DAMAGED[case]
    file = raw_file(tmp_path / "x.safetensors", header, data)
    with refused(FileFormatError, "open_checkpoint", str(file), *words):
        read_header(file)


@pytest.mark.parametrize("length", [9, 10**6, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(length: int, tmp_path: Path) -> None:
    file = raw_file(tmp_path / "x.safetensors", b"{}", bytes(6), length=length)
    with refused(FileFormatError, str(file), f"{length:,} bytes", "16"):
        read_header(file)


@pytest.mark.parametrize("size", range(8))
def test_a_file_of_a_few_bytes_is_refused(size: int, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(bytes(size))
    with refused(FileFormatError, str(file)):
        read_header(file)


@pytest.mark.slow
def test_the_time_to_read_a_header_grows_as_its_length(tmp_path: Path) -> None:
    names = ",".join(f'"{n}":{{}}' for n in range(200_000))
    file = raw_file(tmp_path / "x.safetensors", f'{{{names},"199999":{{}}}}'.encode())
    start = time.perf_counter()
    with refused(FileFormatError, str(file), "duplicate key '199999'"):
        read_header(file)
    assert time.perf_counter() - start < 10  # 0.3 s; minutes if every name is compared with every other


MEGABYTE_HEADERS = {
    "tensors": json.dumps({f"t{k}": entry("U8", [0], 0, 0) for k in range(17_000)}),
    "a long shape": json.dumps({"t": entry("U8", [2**62] * 45_000, 0, 1)}),
    "nested lists": f'{{"t":[{",".join(["[[]]"] * 190_000)}]}}',
    "deep lists": f'{{"t":{"[" * 490_000}{"]" * 490_000}}}',
    "long integers": f'{{"t":[{",".join(["9" * 4200] * 230)}]}}',
    "metadata": json.dumps({"__metadata__": {str(k): "x" for k in range(70_000)}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEGABYTE_HEADERS)
def test_a_header_of_a_megabyte_takes_at_most_twenty_times_json(name: str, tmp_path: Path) -> None:
    """Work in units of a parser beside it, a second in all on a fast machine: seconds depend on the machine.

    Garbage collections are left out: they read the objects of all tests of the process.
    """
    file = raw_file(tmp_path / "x.safetensors", MEGABYTE_HEADERS[name].encode())
    numbers = f"[{','.join(['1'] * 500_000)}]"
    ours, units = [], []
    gc.disable()
    try:
        for _ in range(3):  # the least: a busy machine adds to single ones
            start = time.process_time()
            with contextlib.suppress(FileFormatError):
                read_header(file)
            between = time.process_time()
            json.loads(numbers)
            ours.append(between - start)
            units.append(time.process_time() - between)
    finally:
        gc.enable()
    assert min(ours) < 20 * min(units)  # 6 of them


# ------------------------------------------------------------------------------------------------------------ fuzz


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


MANY = 120
VALID = safetensors.numpy.save(
    {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.int64), "c": np.zeros((0, 2))},
    metadata={"format": "pt"},
)
HEADER = 8 + int.from_bytes(VALID[:8], "little")


def check(file: Path, content: bytes) -> None:
    """`read_header` refuses, or gives tensors that lie apart in the file and are what the package reads there."""
    file.write_bytes(content)
    try:
        tensors, metadata = read_header(file)
    except FileFormatError:
        return
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items())
    reached = 8 + int.from_bytes(content[:8], "little")
    for info in sorted(tensors.values(), key=lambda one: (one.begin, one.end)):
        assert reached <= info.begin <= info.end <= len(content)
        reached = info.end
        stored = info.read_stored()
        assert stored.shape == info.shape
        assert stored.tobytes() == content[info.begin : info.end]
    # A SafetensorError fails the test: what the package refuses is refused here. Here alone are refused repeated names,
    # blanks before the header, shapes that numpy lacks, and dtypes and entries written in other forms of serde's.
    theirs = {name: (one["dtype"], one["shape"], bytes(one["data"])) for name, one in safetensors.deserialize(content)}
    ours = {name: (info.dtype, list(info.shape), info.read_stored().tobytes()) for name, info in tensors.items()}
    assert ours == theirs


@settings(max_examples=MANY)
@given(
    edits=st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, len(VALID)) | st.none(),
)
def test_random_edits_of_a_valid_file(scratch: Path, edits: list[tuple[int, int]], cut: int | None) -> None:
    content = bytearray(VALID)
    for place, byte in edits:
        content[place] = byte
    check(scratch, bytes(content[:cut]))


@settings(max_examples=MANY)
@given(
    place=st.integers(8, HEADER - 1),
    length=st.integers(0, 3),
    text=st.sampled_from([
        *("0", "1", "-", "-0", "9" * 30, "9" * 400, "1e3", "1e-999", "1e999", "NaN", "[", "]", "[" * 130, "null", '"'),
        *(",", "{}", "F16", "\\ud800", "\\ud83d\\ude00", "\x00", "\x7f", "\ufeff", " ", "\t", '"e":', '"shape":[],'),
    ]),
    coding=st.sampled_from(["utf-8"] * 9 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"]),
)  # fmt: skip
def test_random_splices_of_a_valid_header(scratch: Path, place: int, length: int, text: str, coding: str) -> None:
    header = (VALID[8:place].decode() + text + VALID[place + length : HEADER].decode()).encode(coding)
    check(scratch, len(header).to_bytes(8, "little") + header + VALID[HEADER:])


_TEXT = st.text(st.characters(exclude_categories=()), max_size=5)  # with surrogates
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_SIZES = st.integers(-1, 4) | st.integers() | _JSON
_ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*STORED_AS, "F8_E4M3"]) | _JSON,
        "shape": st.lists(_SIZES, max_size=3) | _JSON,
        "data_offsets": st.lists(st.integers(0, 32) | _JSON, min_size=2, max_size=2) | _JSON,
    }
)


@settings(max_examples=MANY)
@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), _ENTRY | _JSON, max_size=3), st.integers(0, 40))
def test_random_headers(scratch: Path, header: dict[str, Any], size: int) -> None:
    raw = json.dumps(header).encode()  # lone surrogates and NaN among them
    check(scratch, len(raw).to_bytes(8, "little") + raw + bytes(size))
