"""Mutations of files: bytes, JSON values, headers of safetensors files, and objects of HDF5 files."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

Mutation = Callable[[Random, bytes], bytes]

EXTREMES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(2**63)),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *("", "abc", "0", "\ud800", "\x00", "../../secret", "/dev/zero", "x" * 100_000, "@deep 90@", "@deep 900@"),
    *("@deep 100000@", [], {}, [[]], [0], {"a": 1}, [None] * 40),
]


def mutate_bytes(rng: Random, content: bytes) -> bytes:
    """Flip bits, overwrite, insert, delete or repeat bytes, or cut the file short."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        place, length = rng.randrange(len(data) + 1), rng.choice([1, 2, 4, 8, 64, 1000])
        match rng.randrange(8):
            case 0 | 1 | 2:
                if place < len(data):
                    data[place] ^= 1 << rng.randrange(8)
            case 3:
                filler = rng.choice([b"\x00", b"\xff", b"\x7f", b"9", b"[", b"\x80"])
                data[place : place + length] = filler * min(length, len(data) - place)
            case 4:
                data[place:place] = rng.randbytes(length)
            case 5:
                del data[place : place + length]
            case 6:
                data[place:place] = data[place : place + length]
            case 7:
                if rng.random() < 0.3:
                    del data[place:]
    return bytes(data)


def mutate_json(rng: Random, content: bytes) -> bytes:
    """Change values of a JSON text: extremes, other types, repeated and missing keys, deep nesting, other encodings."""
    text = json.dumps(_changed(rng, json.loads(content)), ensure_ascii=rng.random() < 0.5)
    for depth in (90, 900, 100_000):
        text = text.replace(f'"@deep {depth}@"', "[" * depth + "]" * depth)
    text = text.replace('"@again ', '"')
    encoding = rng.choice(["utf-8"] * 20 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"])
    return text.encode(encoding, "surrogatepass" if encoding != "latin-1" else "replace")


def mutate_safetensors(rng: Random, content: bytes) -> bytes:
    """Change the JSON header of a safetensors file, or that of tnlib inside it."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    inner = header.get("__metadata__", {}).get("tnlib")
    if inner and rng.random() < 0.7:
        header["__metadata__"]["tnlib"] = mutate_json(rng, inner.encode()).decode("utf-8", "replace")
        raw = json.dumps(header).encode()
    else:
        raw = mutate_json(rng, content[8:start])
    raw += b" " * (-len(raw) % 8)
    length = len(raw) if rng.random() < 0.95 else rng.choice([0, 7, len(raw) + 1, 2**31, 2**63, 2**64 - 1])
    return length.to_bytes(8, "little") + raw + content[start:]


def mutate_claims(rng: Random, content: bytes) -> bytes:
    """Change attributes or arrays of a file of tnlib.save, under the digest that belongs to the changed file."""
    from safetensors.numpy import load, save

    from tnlib.io import _digest

    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    inner, arrays = json.loads(header["__metadata__"]["tnlib"]), load(content)
    attributes = sorted(inner.keys() - {"version", "format", "complex", "digest"})
    if attributes and rng.random() < 0.6:
        values = [None, 0, 1, 2, 3, -1, 0.5, -7.0, 1e3, 10**12, True, "0", [0], [1], [1, 0], [0, 0], {}]
        inner[rng.choice(attributes)] = rng.choice(values)
    else:
        name = rng.choice(sorted(arrays))
        array = np.array(arrays[name])
        scaled = [2 * array, array[::-1], 0 * array, -array, array + 1]
        arrays[name] = np.ascontiguousarray(rng.choice([*scaled, np.moveaxis(array, 0, -1), array[:1]]))
    inner["digest"] = _digest({key: value for key, value in inner.items() if key != "digest"}, arrays)
    return save(arrays, {"tnlib": json.dumps(inner)})  # type: ignore[no-any-return]


ZARR_VALUES: dict[str, list[Any]] = {
    "shape": [[4, 6], [6, 4], [0, 6], [4], [], [2**40, 2**40], [4, 6, 1], [-4, 6]],
    "chunks": [[2, 3], [3, 2], [5, 7], [1, 1], [0, 3], [4], [2**40, 1], [-2, 3]],
    "chunk_shape": [[2, 3], [3, 2], [5, 7], [1, 1], [0, 3], [4], [2**40, 1]],
    "data_type": ["float64", "float32", "int8", "complex64", "bool", "string", "r16", "float8_e4m3"],
    "dtype": ["<f8", "<f4", ">f8", "|i1", "<c8", "|b1", "|O", "<U5", "<M8[s]", [["a", "<f8"]]],
    "name": ["bytes", "zstd", "gzip", "blosc", "transpose", "crc32c", "sharding_indexed", "regular", "default", "abc"],
    "id": ["zlib", "gzip", "bz2", "lzma", "zstd", "lz4", "blosc", "delta", "pickle", "json2"],
    "endian": ["little", "big", "native"],
    "order": ["C", "F", "K", [1, 0], [0, 0]],
    "level": [-1, 0, 9, 99],
    "fill_value": [None, 0, 1.5, "NaN", "Infinity", "0x7fc00000", [0.0, 0.0], "abc"],
    "separator": ["/", ".", ""],
    "dimension_separator": ["/", ".", ""],
    "zarr_format": [2, 3, 1, 4],
    "node_type": ["array", "group"],
    "codecs": [[], [{"name": "bytes", "configuration": {"endian": "big"}}], [{"name": "zstd"}] * 3],
    "filters": [None, [], [{"id": "delta", "dtype": "<f8"}], [{"id": "shuffle", "elementsize": 3}]],
    "compressor": [None, {"id": "zlib", "level": 1}, {"id": "blosc", "cname": "lz4"}],
}


def mutate_zarr(rng: Random, content: bytes) -> bytes:
    """Give keys of the metadata of a zarr array other values of their kind; change the bytes of chunks."""
    if not content.startswith(b"{"):
        return mutate_bytes(rng, content)
    value = json.loads(content)
    places = [(container, key) for container, key in _places(value) if key in ZARR_VALUES]
    for container, key in rng.choices(places, k=rng.choice([1, 1, 2, 3])):
        container[key] = copy.deepcopy(rng.choice(ZARR_VALUES[key]))
    return json.dumps(value).encode()


def mutate_npz(rng: Random, content: bytes) -> bytes:
    """Change values, dtypes, shapes and orders of arrays of an npz file, exchange or drop some."""
    if not content.startswith(b"PK"):
        return mutate_bytes(rng, content)
    with np.load(io.BytesIO(content)) as opened:
        arrays = dict(opened)
    name, other = rng.choice(list(arrays)), rng.choice(list(arrays))
    a = arrays[name]
    flat = a.reshape(-1)
    match rng.randrange(5):
        case 0 if a.size:
            place = rng.randrange(a.size)
            flat[place] = flat[place] + 1
        case 1:
            arrays[name] = a.astype(rng.choice(["f4", ">f8", "i8", "c16", "S3", "?"]))
        case 2:
            arrays[name] = np.asfortranarray(a[..., :-1] if a.ndim else np.ones(3))
        case 3:
            arrays[name], arrays[other] = arrays[other], a
        case _:
            del arrays[name]
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def mutate_tensors(rng: Random, content: bytes) -> bytes:
    """Change dtypes, shapes and numbers of tensors of a safetensors file, whose header stays true; drop some."""
    sizes = {"I32": 4, "I64": 8, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "BOOL": 1}
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    offsets = {name: entry["data_offsets"] for name, entry in header.items()}
    stored = {name: content[start + begin : start + end] for name, (begin, end) in offsets.items()}
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(list(header))
        shape, data = header[name]["shape"], stored[name]
        match rng.randrange(5):
            case 0:
                header[name]["dtype"] = rng.choice(list(sizes))
            case 1:
                axis = rng.randrange(len(shape) + 1)
                shape[axis : axis + rng.randrange(2)] = [rng.choice([0, 1, 2, 32, 64, 100])]
            case 2 if shape:
                shape[rng.randrange(len(shape))] = rng.choice([0, 1, 2, 3, 4, 6, 31, 32, 33, 64, 96])
            case 3 if data:
                place = 4 * rng.randrange(len(data) // 4 + 1)
                value = np.array(rng.choice([0, 1, -1, 2, 32, 2**31 - 1, -(2**31)]), "<i4").tobytes()
                stored[name] = (data[:place] + value + data[place + 4 :])[: len(data)]
            case 4 if len(header) > 1:
                del header[name]
    data = b""
    for name, entry in header.items():
        length = math.prod(entry["shape"]) * sizes[entry["dtype"]]
        entry["data_offsets"] = [len(data), len(data) + length]
        data += (stored[name] * (length // max(len(stored[name]), 1) + 1))[:length].ljust(length, b"\0")
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def mutate_npy(rng: Random, content: bytes) -> bytes:
    """Change values of the header of an npy file, its syntax, its length or its version."""
    start = 10 + int.from_bytes(content[8:10], "little")
    header = content[10:start].decode("latin-1")
    shapes = [
        "(3, 4)",
        "()",
        "(0,)",
        "(-1, 4)",
        "(3,)",
        "(2**62, 8)",
        "(10**30,)",
        "(True, 4)",
        "(1.5,)",
        "None",
        "[3]",
    ]
    kinds = ["'<f8'", "'>f8'", "'|O'", "'<U5'", "'V16'", "'M8[s]'", "[('a', '<f8')]", "'<f8' * 9", "3", "'f9'", "None"]
    for _ in range(rng.choice([1, 1, 2])):
        match rng.randrange(5):
            case 0:
                header = re.sub(r"\([^)]*\)", lambda _: rng.choice(shapes), header, count=1)
            case 1:
                header = re.sub(r"'descr': [^,]*", lambda _: f"'descr': {rng.choice(kinds)}", header, count=1)
            case 2:
                header = header.replace(
                    rng.choice(["True", "False", "shape", "}", "'", ","]),
                    rng.choice(["", "(", "\\", "\0", "True", "False"]),
                )
            case 3:
                header = rng.choice(["", "{", "[" * 500, "'", "PK", "\t\n (", "1" * 5000, header * 2])
            case 4:
                place = rng.randrange(len(header) + 1)
                header = header[:place] + rng.choice(["\n", "\xff", "#", '"""', "lambda: 0"]) + header[place:]
    raw = header.encode("latin-1")
    length = len(raw) if rng.random() < 0.9 else rng.choice([0, 1, 65535])
    version = content[6:8] if rng.random() < 0.9 else rng.choice([b"\x02\x00", b"\x03\x00", b"\x09\x00"])
    magic = content[:6] if rng.random() < 0.95 else rng.choice([b"PK\x03\x04\0\0", b"\x80\x04abcd"])
    return magic + version + length.to_bytes(2, "little") + raw + content[start:]


def mutate_hdf5(outside: Path) -> Mutation:
    """Return a mutation of the objects of an HDF5 file; some become links to files of the folder `outside`."""
    import h5py

    def mutate(rng: Random, content: bytes) -> bytes:
        buffer = io.BytesIO(content)
        with h5py.File(buffer, "r+") as opened:
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                _change_object(rng, opened, outside)
        return buffer.getvalue()

    return mutate


def _changed(rng: Random, value: Any) -> Any:
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = [(None, None), *_places(value)]
        container, key = rng.choice(places[1:] or places)
        new = copy.deepcopy(rng.choice(EXTREMES) if rng.random() < 0.7 else _value(value, rng.choice(places)))
        if container is None or rng.random() < 0.02:
            value = new
        elif isinstance(container, dict) and rng.random() < 0.25:
            match rng.randrange(3):
                case 0:
                    del container[key]
                case 1:
                    container[f"@again {key}"] = new
                case 2:
                    container[rng.choice(["", "\ud800", "x" * 10_000, "e"])] = container.pop(key)
        elif isinstance(container, list) and rng.random() < 0.25:
            container[key : key + 1] = rng.choice([[], [new, new]])
        else:
            container[key] = new
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All pairs (container, key) in a JSON value."""
    found, rest = [], [value]
    while rest:
        container = rest.pop()
        if isinstance(container, dict | list):
            keys = list(container) if isinstance(container, dict) else range(len(container))
            found += [(container, key) for key in keys]
            rest += [container[key] for key in keys]
    return found


def _value(root: Any, place: tuple[Any, Any]) -> Any:
    container, key = place
    return root if container is None else container[key]


NUMBERS = [0, -1, 1, 2, 7, 99, 2**31, 2**62, -(2**62), 0.5, 1e308, 1e-308, np.nan, np.inf, 1e308 + 1e308j, True]


def _change_object(rng: Random, opened: Any, outside: Path) -> None:
    import h5py

    names: list[str] = []
    opened.visit(names.append)
    name = rng.choice(sorted(names) or ["/"])
    item = opened.get(name, opened)
    attributes = sorted(item.attrs)
    if attributes and rng.random() < 0.3:
        key = rng.choice(attributes)
        values = [*NUMBERS, "", "abc", b"\xff", "list", "None", "array", "Dense{Float64}", [1, 2], h5py.Empty("f8")]
        if rng.random() < 0.15:
            del item.attrs[key]
        else:
            item.attrs[key] = rng.choice(values)
        return
    old = dict(item.attrs)
    if isinstance(item, h5py.Dataset) and rng.random() < 0.8:
        a = item[()] if item.shape is not None else np.zeros(1)
        if not isinstance(a, np.ndarray | np.generic) or np.asarray(a).dtype.kind not in "iufc":
            a = np.zeros(2)
        a = np.asarray(a)
        del opened[name]
        _NEW_DATASETS[rng.choice(sorted(_NEW_DATASETS))](rng, opened, name, a, outside)
        if opened.get(name, getclass=True, getlink=True) is h5py.HardLink:
            opened[name].attrs.update(old)
        return
    if name != "/":
        other = rng.choice(sorted(names))
        moved = opened[other]
        del opened[name]
        if rng.random() < 0.7:
            opened[name] = moved


def _values(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    new = np.array(a)
    flat = new.reshape(-1)
    for _ in range(rng.choice([1, 1, 3])):
        if flat.size:
            with np.errstate(all="ignore"):
                value = np.asarray(rng.choice(NUMBERS))
                flat[rng.randrange(flat.size)] = value.astype(new.dtype) if value.dtype.kind != "c" else 3
    opened[name] = new


def _another_shape(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (9,), (2, 2), (1, 1, 1), (3, 0, 2), (1,) * 20]
    opened[name] = np.resize(a, rng.choice(shapes)) if a.size else np.zeros(rng.choice(shapes))


def _another_type(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    kinds = ["i1", "u8", ">i8", "f2", "f4", "f8", ">f8", "c8", "c16", "?", "S5", "g"]
    with np.errstate(all="ignore"):
        opened[name] = a.real.astype(rng.choice(kinds))


def _text(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    opened[name] = rng.choice(["", "abc", "finite", "vL", b"\xff\xfe", "x" * 50_000])


def _unwritten(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    shape = (rng.choice([5, 1 << 20, 1 << 40]),) * max(a.ndim, 1)
    if np.prod([float(n) for n in shape]) < 2**60:
        opened.create_dataset(name, shape, a.dtype, chunks=rng.choice([None, (2,) * len(shape)]))


def _compressed(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    a = np.atleast_1d(a)
    if not a.size:
        return
    data = opened.create_dataset(name, data=a, chunks=a.shape, compression=9, shuffle=rng.random() < 0.5)
    if rng.random() < 0.5:
        raw = zlib.compress(a.tobytes() + bytes(rng.choice([0, 8, 1 << 27])), 9)
        data.id.write_direct_chunk((0,) * a.ndim, raw[: rng.choice([len(raw), 3])])


def _zeros(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    opened.create_dataset(name, data=np.zeros((1 << 22, *(1,) * (max(a.ndim, 1) - 1))), compression=9, chunks=True)


def _external(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    files = [(str(outside / rng.choice(["secret.h5", "secret.bin"])), 0, max(a.nbytes, 1))]
    opened.create_dataset(name, a.shape or (1,), a.dtype, external=files)


def _virtual(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    import h5py

    layout = h5py.VirtualLayout(a.shape or (1,), a.dtype)
    layout[...] = h5py.VirtualSource(str(outside / "secret.h5"), "x", a.shape or (1,))
    opened.create_virtual_dataset(name, layout)


def _link(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    import h5py

    opened[name] = rng.choice(
        [h5py.ExternalLink(str(outside / "secret.h5"), "x"), h5py.SoftLink("/"), h5py.SoftLink(f"/{name}")]
    )


def _empty(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    import h5py

    opened[name] = h5py.Empty("f8")


def _group(rng: Random, opened: Any, name: str, a: np.ndarray, outside: Path) -> None:
    opened.create_group(name)


_NEW_DATASETS: dict[str, Callable[[Random, Any, str, np.ndarray, Path], None]] = {
    change.__name__: change
    for change in (
        *(_values, _another_shape, _another_type, _text, _unwritten, _compressed, _zeros),
        *(_external, _virtual, _link, _empty, _group),
    )
}
