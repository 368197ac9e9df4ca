"""save and load: bit-for-bit round trips, damaged and foreign files."""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import safetensors.numpy
from safetensors import safe_open

import tnlib

VIDALS = [
    tnlib.vidal(tnlib.TensorTrain(oracles.random_cores(shape, ranks, dtype), log_scale=scale))
    for dtype in oracles.DTYPES
    for shape, ranks, scale in [((2, 3, 2), (1, 2, 2, 1), 0.0), ((3,), (1, 1), -1e3), ((2, 2), (1, 1, 1), 1 / 3)]
]
ALL_FORMATS = [*oracles.ALL_FORMATS, *VIDALS]


def test_every_format_is_here() -> None:
    from tnlib._format import Format

    values = (getattr(tnlib, name) for name in tnlib.__all__)
    kinds = {kind for kind in values if isinstance(kind, type) and issubclass(kind, Format)}
    public = {kind for kind in kinds if not inspect.isabstract(kind)}
    assert public == {type(value) for value in ALL_FORMATS}


TINY = np.nextafter(0, 1)
SPECIAL = np.array([[-0.0, TINY, 1e308], [-TINY, 1 / 3, -1e308]])
TURNED = np.stack([SPECIAL.T, -SPECIAL.T], axis=-1).view(complex)[..., 0]
ODD = [
    tnlib.LowRank(SPECIAL, TURNED),
    tnlib.TensorTrain(oracles.random_cores((2,) * 23, (1, *range(2, 24), 1)), log_scale=0.1),  # cores.10 < cores.2
    tnlib.TensorTrain([np.ones((1, 2, 1))], center=np.int64(0), log_scale=np.float32(0.5)),
    tnlib.SVD(np.eye(2, 1), [1.0], np.eye(1, 3), left=np.array([1])),
    *(tnlib.LowRank(layout(SPECIAL), layout(TURNED)) for layout in oracles.LAYOUTS.values()),
]


@pytest.mark.parametrize("value", [*ALL_FORMATS, *ODD], ids=oracles.format_id)
def test_round_trip_bit_for_bit(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "value.safetensors"
    tnlib.save(str(path), value)
    loaded = tnlib.load(path)
    oracles.assert_same_bits(loaded, value)
    assert all(not a.flags.writeable for a in loaded.arrays())
    assert [p.name for p in tmp_path.iterdir()] == ["value.safetensors"]


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    value = tnlib.Tucker(np.ones((1, 2)), [np.ones((3, 1)), np.ones((4, 2))])
    tnlib.save(tmp_path / "a", value)
    arrays = safetensors.numpy.load_file(tmp_path / "a")
    assert {name: a.shape for name, a in arrays.items()} == {"core": (1, 2), "factors.0": (3, 1), "factors.1": (4, 2)}


@pytest.mark.parametrize("bad", [np.ones(3), None, {"cores": []}, tnlib.TensorTrain, "a"])
def test_only_formats_are_saved(bad: Any, tmp_path: Path) -> None:
    with oracles.refused(TypeError, "save: value must be a format", type(bad).__name__):
        tnlib.save(tmp_path / "a", bad)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- files that are not


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good"
    tnlib.save(path, tnlib.TensorTrain(oracles.random_cores((3, 4), (1, 2, 1), np.complex128), center=None))
    return path


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with safe_open(path, framework="numpy") as opened:
        header = json.loads(opened.metadata()["tnlib"])
    return header, safetensors.numpy.load_file(path)


def write(path: Path, header: Any, arrays: dict[str, np.ndarray], *, digest: bool = False) -> None:
    if digest:  # of what is written
        rest = {key: x for key, x in header.items() if key != "digest"}
        header = rest | {"digest": tnlib.io._digest(rest, arrays)}
    text = header if isinstance(header, str) else json.dumps(header)
    safetensors.numpy.save_file(arrays, path, {"tnlib": text})


def test_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match="load: path must be a file"):
            tnlib.load(path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 50, 0.5, 0.9, -1])
def test_a_file_cut_short(good: Path, keep: float) -> None:
    data = good.read_bytes()
    good.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with oracles.refused(ValueError, "load: ", str(good), "not a whole safetensors file"):
        tnlib.load(good)


def test_bytes_behind_the_end(good: Path) -> None:
    good.write_bytes(good.read_bytes() + b"\0")
    with oracles.refused(ValueError, "load: ", str(good)):
        tnlib.load(good)


def test_a_foreign_safetensors_file(tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "a", metadata)
        with oracles.refused(ValueError, "load: ", "without a tnlib header"):
            tnlib.load(tmp_path / "a")


class Bomb:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_a_pickle_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle was opened")

    (tmp_path / "a").write_bytes(pickle.dumps(Bomb()))
    np.save(tmp_path / "b.npy", np.array([1, None], object), allow_pickle=True)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, explode)
    for name in ("a", "b.npy"):
        with oracles.refused(ValueError, "load: ", "not a whole safetensors file"):
            tnlib.load(tmp_path / name)


HEADERS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(
        ({"version": version}, (f"has version {version!r}", "reads versions up to 2", "newer tnlib"))
        for version in (0, 3, 99, "1.5", None, True, 1.0, "1")
    ),
    *(({"format": name}, (f"holds a format {name!r}", "newer tnlib")) for name in ("TensorRing", "", 3, None, "dict")),
    *(({key: ...}, ("damaged tnlib header", key)) for key in ("version", "format", "complex", "center", "digest")),
    ({"exponent": ...}, ("damaged tnlib header", "exponent")),
    *(({"center": center}, ()) for center in (7, "x")),
    *(({"complex": names}, ()) for names in (3, [])),
    ({"format": "Tucker"}, ()),
    *(({"exponent": scale}, ()) for scale in ("x", 1.5, True, 10**400, math.nan, math.inf, "1", None)),
    ({"symmetry": "U(1)"}, ("holds keys ['symmetry'] that this tnlib does not know",)),
]


def test_headers_that_do_not_fit_are_refused(good: Path) -> None:
    """A version, a format or a key that is not known, missing or of another type."""
    header, arrays = read(good)
    for change, words in HEADERS:
        write(good, {key: value for key, value in (header | change).items() if value is not ...}, arrays)
        with oracles.refused(tnlib.FileFormatError, f"load: {good} ", *words):
            tnlib.load(good)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "3", '"text"', "{}", '{"version": 1}'),
        *("[" * 100_000, '{"version": ' + "1" * 5000 + "}", '{"a": NaN', "\u0000"),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_header(good: Path, text: str) -> None:
    write(good, text, read(good)[1])
    with oracles.refused(tnlib.FileFormatError, f"load: {good} has a damaged tnlib header", "save it again"):
        tnlib.load(good)


def test_arrays_that_do_not_fit(good: Path) -> None:
    """Missing or of another name, shape or dtype, pairs that are no complex numbers, legs of size zero."""
    header, arrays = read(good)
    first, one = {"cores.0": arrays["cores.0"]}, np.ones((2, 3, 1))
    for changed, words in (
        (first, ()),
        (first | {"cores.2": arrays["cores.1"]}, ()),
        (first | {"cores.x": arrays["cores.1"]}, ()),
        ({}, ()),
        (arrays | {"cores.1": one}, ()),
        (arrays | {"cores.1": one.astype(np.float16)}, ()),
        (arrays | {"cores.1": np.ones((2, 4, 1, 3))}, ()),
        (arrays | {"cores.0": np.ones((1, 3, 2, 4))}, ()),
        (arrays | {"cores.1": np.ones((2, 4, 1))}, ()),
        (arrays | {"cores.0": np.ones((1, 0, 2, 2))}, ("size 0",)),
        (arrays | {"cores": np.ones((1, 2, 1))}, ("holds arrays ['cores'] that this tnlib does not know",)),
        *(
            ({name: a.astype(dtype) for name, a in arrays.items()}, (dtype,))
            for dtype in ("float16", "int64", "uint8", "bool")
        ),
    ):
        write(good, header, changed)
        with oracles.refused(tnlib.FileFormatError, "load: ", str(good), *words):
            tnlib.load(good)


@pytest.mark.parametrize("key", ["note", "version", "format", "complex", "center", "digest"])
def test_headers_nested_deeper_than_python_follows(good: Path, key: str) -> None:
    """json.loads reads some of them; json.dumps and repr exhaust the stack."""
    header, arrays = read(good)
    for depth in (101, 300, 900, 990):
        text = json.dumps(header | {key: "DEEP"}).replace('"DEEP"', "[" * depth + "]" * depth)
        write(good, text, arrays)
        with oracles.refused(tnlib.FileFormatError, f"load: {good} "):
            tnlib.load(good)


@pytest.mark.parametrize("key", ["version", "format", "complex", "center", "digest", "n" * 10**6])
def test_messages_are_short_whatever_the_file_holds(good: Path, key: str) -> None:
    header, arrays = read(good)
    for long in ("a" * 10**6, ["b"] * 10**5):
        write(good, header | {key: long}, arrays)
        with pytest.raises(tnlib.FileFormatError) as caught:
            tnlib.load(good)
        assert len(str(caught.value)) <= 1000
        assert str(caught.value).startswith(f"load: {good}")
        assert str(caught.value).endswith(".")  # the remedy remains


def test_more_legs_than_numpy_has(good: Path) -> None:
    header, _ = read(good)
    text = {"__metadata__": {"tnlib": json.dumps(header)}}
    text["x"] = {"dtype": "F64", "shape": [1] * 70, "data_offsets": [0, 8]}
    raw = json.dumps(text).encode()
    good.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with oracles.refused(tnlib.FileFormatError, "load: ", str(good), "safetensors file"):
        tnlib.load(good)


@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3", "F8_E5M2", "C64", "X"])
def test_dtypes_that_numpy_lacks(good: Path, kind: str) -> None:
    size = {"BF16": 2, "C64": 8}.get(kind, 1)
    header = {"__metadata__": {"tnlib": json.dumps(read(good)[0])}}
    header["cores.0"] = {"dtype": kind, "shape": [1, 4, 1], "data_offsets": [0, 4 * size]}
    text = json.dumps(header).encode()
    good.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * size))
    with oracles.refused(tnlib.FileFormatError, "load: ", str(good)):
        tnlib.load(good)


SMALL = [
    tnlib.TensorTrain(oracles.random_cores((3, 2), (1, 2, 1), np.complex64), None, 1 / 3),
    tnlib.SVD(oracles.isometry(4, 2), [2.0, 1.0], oracles.isometry(3, 2).T),
    tnlib.CP(np.array([2.0, 1.0]), [oracles.normal((3, 2)), oracles.normal((2, 2))]),
    tnlib.KroneckerTerms(oracles.normal((2, 2, 1)), [tnlib.LowRank(np.ones((2, 1)), np.ones((1, 3)))] * 2),
    VIDALS[0],
]


def loads_the_same_or_not_at_all(path: Path, value: Any, data: bytes) -> bool:
    """Whether the file is refused; anything but that, or the same value, fails."""
    path.write_bytes(data)
    try:
        loaded = tnlib.load(path)
    except tnlib.FileFormatError as problem:
        assert str(path) in str(problem)  # noqa: PT017 - what else it may be is not refused
        return True
    oracles.assert_same_bits(loaded, value)
    return False


@pytest.mark.parametrize("value", SMALL, ids=oracles.format_id)
def test_a_flipped_bit_gives_a_file_error_or_the_same_format(value: Any, tmp_path: Path) -> None:
    tnlib.save(tmp_path / "a", value)
    data = (tmp_path / "a").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    refused = []
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        refused.append(loads_the_same_or_not_at_all(tmp_path / "a", value, bytes(changed)))
    assert all(refused[start:]), "a changed number was read"


@pytest.mark.parametrize("value", ALL_FORMATS, ids=oracles.format_id)
def test_a_gauge_that_a_value_does_not_have_is_refused(value: Any, tmp_path: Path) -> None:
    """Of a file that was changed together with its digest, and of a value in memory."""
    tnlib.save(tmp_path / "a", value)
    header, arrays = read(tmp_path / "a")
    changes: list[dict[str, np.ndarray]] = []
    for name, a in arrays.items():
        changes.append({name: (a * 1.1).astype(a.dtype)})
        if a.ndim == 1 and len(a) > 1:
            changes.append({name: a[::-1].copy()})
    for change in changes:
        write(tmp_path / "a", header, {**arrays, **change}, digest=True)
        try:
            loaded = tnlib.load(tmp_path / "a")
        except tnlib.FileFormatError:
            continue
        assert loaded.norm() == pytest.approx(np.linalg.norm(loaded.full()), rel=1e-4)


def test_a_false_centre_is_not_saved(tmp_path: Path) -> None:
    false = tnlib.TensorTrain(oracles.random_cores((2, 3, 2), (1, 2, 2, 1)), center=1)
    with oracles.refused(ValueError, "save: value must be in the gauge", "isometric", "canonicalize"):
        tnlib.save(tmp_path / "a", false)
    assert not [*tmp_path.iterdir()]
    tnlib.save(tmp_path / "a", tnlib.canonicalize(tnlib.TensorTrain(false.cores), 1))


# ---------------------------------------------------------------------------------------------- files of version 1

DATA = Path(__file__).parent / "data"


def ramp(shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    x = (np.arange(1, np.prod(shape) + 1) / 8).reshape(shape)
    return (x - 0.5j * x[::-1]).astype(dtype) if np.dtype(dtype).kind == "c" else x.astype(dtype)


# Written by tnlib 0.1, where a train had a natural logarithm as its scale.
VERSION_1 = [
    tnlib.SVD(np.eye(6, 2, dtype=complex).reshape(2, 3, 2), [2.0, 0.5], np.eye(2, 4, dtype=complex), left=(2, 0)),
    tnlib.LowRank(ramp((3, 2), np.float32), ramp((2, 4), np.float32)),
    tnlib.TensorTrain([np.eye(2, dtype=complex)[None], ramp((2, 3, 1), complex)], center=1, log_scale=-2.5),
    tnlib.TTMatrix([ramp((1, 2, 2, 2)), 1e-200 * ramp((2, 1, 3, 1))], log_scale=1000.0),
    tnlib.Tucker(ramp((2, 1)), [ramp((3, 2)), ramp((2, 1))]),
    tnlib.CP([2.0, 1.0], [ramp((3, 2)), ramp((2, 2)), ramp((2, 2))]),
    tnlib.KroneckerTerms(ramp((2, 2, 3)), [tnlib.LowRank(ramp((2, 1)), ramp((1, 2))), ramp((2, 2))]),
    tnlib.Vidal([np.eye(2)[None], np.eye(2, 3)[..., None]], [np.array([0.8, 0.6])], log_scale=0.75),
]


@pytest.mark.parametrize("value", VERSION_1, ids=oracles.format_id)
def test_files_of_version_1_still_load(value: Any, tmp_path: Path) -> None:
    file = DATA / f"version_1_{type(value).__name__}.safetensors"
    assert read(file)[0]["version"] == 1
    loaded = tnlib.load(file)
    oracles.assert_same_bits(loaded, value)
    tnlib.save(tmp_path / "a", loaded)
    assert read(tmp_path / "a")[0]["version"] == 2
    oracles.assert_same_bits(tnlib.load(tmp_path / "a"), value)


def test_keys_belong_to_their_version(tmp_path: Path) -> None:
    header, arrays = read(DATA / "version_1_TensorTrain.safetensors")
    path = tmp_path / "a"
    write(path, header | {"exponent": 3}, arrays)
    with oracles.refused(ValueError, "holds keys ['exponent'] that this tnlib does not know"):
        tnlib.load(path)
    write(path, {key: x for key, x in header.items() if key != "log_scale"}, arrays)
    with oracles.refused(ValueError, "damaged tnlib header", "log_scale"):
        tnlib.load(path)
    write(path, header | {"version": 2}, arrays)
    with oracles.refused(ValueError, "holds keys ['log_scale'] that this tnlib does not know"):
        tnlib.load(path)
    write(path, header | {"log_scale": -2.0}, arrays)
    with oracles.refused(ValueError, "its digest differs"):
        tnlib.load(path)
    for scale in (10**400, float("nan"), float("inf"), "1", None):
        write(path, header | {"log_scale": scale}, arrays)
        with oracles.refused(tnlib.FileFormatError, "load: ", str(path)):
            tnlib.load(path)


@oracles.each_dtype
def test_scales_at_the_edge_of_the_range_are_kept_bit_for_bit(dtype: np.dtype, tmp_path: Path) -> None:
    train = tnlib.TensorTrain(oracles.random_cores((3, 4, 2), (1, 2, 2, 1), dtype))
    for exponent in (0, 30, 39, 41, 70, 101, 399, 401, 5000):
        for sign in (1, -1):
            scaled = tnlib.TensorTrain(train.cores, exponent=sign * exponent)
            for value in (scaled, tnlib.round(scaled, rtol=1e-3).value, tnlib.canonicalize(scaled, 1), 3 * scaled):
                tnlib.save(tmp_path / "a", value)
                oracles.assert_same_bits(tnlib.load(tmp_path / "a"), value)
