"""All readers of files, with valid files to begin from and the mutations that suit them."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracles
from tnlib_adapters import builtin_path, open_checkpoint

import tnlib

from .mutations import (
    Mutation,
    mutate_bytes,
    mutate_claims,
    mutate_hdf5,
    mutate_json,
    mutate_npy,
    mutate_npz,
    mutate_safetensors,
    mutate_tensors,
    mutate_zarr,
)


@dataclass(frozen=True)
class Reader:
    """A reader, the folder in which it reads, and the files in it that are mutated."""

    samples: Sequence[Path]
    mutations: Sequence[Mutation]
    read: Callable[[Path], Any]


def saved_values(folder: Path) -> dict[Path, Any]:
    """Save a value of every format, and of trains with a centre; return them by their files."""
    vidal = tnlib.vidal(tnlib.tt_svd(oracles.normal((2, 2))).value)
    values = {folder / f"{k}.safetensors": value for k, value in enumerate([*oracles.ALL_FORMATS, vidal])}
    for file, value in values.items():
        tnlib.save(file, value)
    return values


def assert_norm_is_that_of_entries(value: Any) -> None:
    """The norm, which a claimed gauge gives, is that of the array."""
    if isinstance(value, np.ndarray) or math.prod(value.shape) > 1 << 16:
        return
    size = oracles.norm(value.full())
    assert abs(value.norm() - size) <= 1e-3 * size + 1e-300, "a norm that is not that of the entries"


def claims(folder: Path, outside: Path) -> Reader:
    return Reader(
        list(saved_values(folder)), [mutate_claims], lambda file: assert_norm_is_that_of_entries(tnlib.load(file))
    )


def load(folder: Path, outside: Path) -> Reader:
    values = saved_values(folder)
    return Reader(
        list(values),
        [mutate_bytes, mutate_safetensors],
        lambda file: oracles.assert_same_bits(tnlib.load(file), values[file]),
    )


def safetensors(folder: Path, outside: Path) -> Reader:
    from safetensors import deserialize
    from safetensors.numpy import save_file
    from tnlib_adapters.files.safetensors_file import read_header

    def read(file: Path) -> None:
        tensors, _ = read_header(file)
        for info in tensors.values():
            info.read_finite()
        deserialize(file.read_bytes())  # what it refuses is to be refused

    kinds = [np.float32, np.float16, np.int64, np.bool_]
    arrays = {f"a.{k}": np.ones((k, 3), kind) for k, kind in enumerate(kinds)}
    save_file(arrays, folder / "a.safetensors", {"format": "pt"})
    save_file({"x": np.ones(())}, folder / "b.safetensors")
    return Reader(sorted(folder.iterdir()), [mutate_bytes, mutate_safetensors], read)


def checkpoint(folder: Path, outside: Path, *, files: Sequence[str], mutations: Sequence[Mutation]) -> Reader:
    from checkpoint_folders import random_folder
    from tnlib_adapters.reference.model import run

    random_folder(folder / "bert", "bert", n_files=2)
    random_folder(folder / "gpt2", "gpt2")
    shutil.copytree(builtin_path("llama"), folder / "llama")

    def read(file: Path) -> None:
        opened = open_checkpoint(file.parent)
        for layer in range(min(opened.n_layers, 2)):
            opened.attention(layer)
        if file.parent.name == "llama":  # the others have no feed-forward parts
            run(opened, np.arange(5)[None])

    samples = [file for name in files for file in sorted(folder.glob(f"*/{name}"))]
    return Reader(samples, mutations, read)


def integers(folder: Path, outside: Path) -> Reader:
    """Weights in integers of engines."""
    from tnlib_adapters.factors.engine_tensors import DESCRIBE, ENCODE, with_dequantized
    from tnlib_adapters.factors.gguf_blocks import GGUF, block_formats
    from tnlib_adapters.factors.integers import IntegerFormat
    from tnlib_adapters.factors.rounding import round_to_nearest
    from tnlib_adapters.files.folder import open_folder
    from tnlib_adapters.files.safetensors_file import Entry, write_tensor_file

    for stored_as, bits in itertools.product(DESCRIBE, (3, 8)):
        form = IntegerFormat(bits, 0, 32, has_zero=True)
        if stored_as == GGUF:
            (form,) = block_formats(256, (bits,))
        tensors = ENCODE[stored_as](round_to_nearest(oracles.normal((256, 32)).astype(np.float32), form))
        place = folder / f"{stored_as}-{bits}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"quantization_config": DESCRIBE[stored_as]({"m": form})}))
        entries = [Entry(f"m.{name}", *stored) for name, stored in tensors.items()]
        list(write_tensor_file(place / "model.safetensors", entries, {}))

    def read(file: Path) -> None:
        for info in with_dequantized(open_folder(file.parent)).tensors.values():
            info.read_finite()

    def mutate(rng: Any, content: bytes) -> bytes:
        return mutate_json(rng, content) if content.startswith(b"{") else mutate_tensors(rng, content)

    return Reader(sorted(folder.glob("*/*")), [mutate, mutate, mutate_bytes], read)


def tokenizer(folder: Path, outside: Path) -> Reader:
    from tnlib_adapters.files.tokenizer import token_names

    pieces = {"model": {"vocab": [["<s>", 0.0], ["\u2581the", -1.5]]}, "added_tokens": [{"id": 2, "content": "<new>"}]}
    contents = {
        "bytes/tokenizer.json": (builtin_path("llama") / "tokenizer.json").read_text(encoding="utf-8"),
        "pieces/tokenizer.json": json.dumps(pieces),
        "words/vocab.json": json.dumps({"a": 0, "\u0120b": 1, "\u00e9": 2}),
        "lines/vocab.txt": "[PAD]\nthe\n##s\n",
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text, encoding="utf-8")

    def read(file: Path) -> None:
        names = token_names(file.parent) or {}
        assert all(type(number) is int and number >= 0 for number in names), "a key of another type"
        assert all(type(name) is str for name in names.values()), "a value of another type"
        "".join(names.values()).encode()

    def mutate(rng: Any, content: bytes) -> bytes:
        return mutate_json(rng, content) if content.startswith(b"{") else mutate_bytes(rng, content)

    return Reader([folder / name for name in contents], [mutate_bytes, mutate], read)


def itensor(folder: Path, outside: Path) -> Reader:
    import h5py
    from itensor_files import leg, put_tensor
    from tnlib_adapters.interop import itensor as library

    dtypes = [np.float64, np.complex128]
    for k, dtype in enumerate(dtypes):
        cores = oracles.random_cores((2, 3, 2), (1, 2, 2, 1), dtype)
        library.write(folder / f"state_{k}.h5", tnlib.TensorTrain(cores))
    operator = tnlib.TTMatrix([oracles.normal((1, 2, 2, 2)), oracles.normal((2, 2, 2, 1))])
    library.write(folder / "operator.h5", operator)
    library.write(folder / "tensor.h5", oracles.normal((2, 3, 4)))
    with h5py.File(folder / "blocks.h5", "w") as opened:
        legs = [leg(f"Site,n={k}", 3, id=k, blocks=[1, 2]) for k in range(2)]
        put_tensor(opened, "T", np.diag([1.0, 2.0, 3.0]), legs)

    def read(file: Path) -> None:
        assert_norm_is_that_of_entries(library.read(file))

    return Reader(sorted(folder.iterdir()), [mutate_bytes, mutate_hdf5(outside)], read)


def tenpy(folder: Path, outside: Path) -> Reader:
    from tenpy.networks.site import SpinHalfSite
    from tnlib_adapters.interop import tenpy as library

    up, down = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    charged = np.einsum("i,j,k->ijk", up, up, down) + np.einsum("i,j,k->ijk", up, down, up)
    state = tnlib.tt_svd(charged).value
    library.write(folder / "charged.h5", state, SpinHalfSite("Sz"))
    library.write(folder / "state.h5", tnlib.TensorTrain(oracles.random_cores((2, 2), (1, 2, 1), np.complex128)))
    library.write(folder / "vidal.h5", tnlib.vidal(state))
    library.write(folder / "operator.h5", tnlib.TTMatrix([oracles.normal((1, 2, 2, 2)), oracles.normal((2, 2, 2, 1))]))

    def read(file: Path) -> None:
        assert_norm_is_that_of_entries(library.read(file))

    return Reader(sorted(folder.iterdir()), [mutate_bytes, mutate_hdf5(outside)], read)


def statistics(folder: Path, outside: Path) -> Reader:
    from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder
    from tnlib_adapters.compression.calibration.statistics import Statistics

    run, square, keys = CalibrationFolder(folder), np.eye(4, dtype=np.float32), ("0.q", "0.k")
    scales = dict.fromkeys(keys, square.astype(np.float64))
    run.save(0, Statistics({"0.x": square}, dict.fromkeys(keys, square), scales))

    def read(file: Path) -> None:
        (group,) = run.groups()
        found = run.statistics(group, {"0.x", *keys})
        for part in (found.reads, found.slopes, found.scales):
            for values in part.values():
                assert np.array_equal(values, square), "numbers that were changed"

    return Reader([folder / "group0.safetensors"], [mutate_bytes, mutate_safetensors], read)


def npy(folder: Path, outside: Path) -> Reader:
    from tnlib_adapters.files.array_files import describe_file, open_array

    np.save(folder / "a.npy", oracles.normal((3, 4)))
    np.save(folder / "b.npy", np.asfortranarray(oracles.normal((2, 3, 2), np.complex64)))

    def read(file: Path) -> None:
        describe_file(file)
        with open_array("fuzz", file) as array:
            if math.prod(array.shape) < 1000:
                tnlib.tt_svd(array)

    return Reader(sorted(folder.iterdir()), [mutate_bytes, mutate_npy], read)


def zarr(folder: Path, outside: Path) -> Reader:
    import zarr as library
    from tnlib_adapters.files.array_files import describe_file, open_array

    library.save_array(folder / "a.zarr", oracles.normal((4, 6)))
    chunked = library.create_array(folder / "b.zarr", shape=(4, 6), chunks=(2, 3), dtype="f4", zarr_format=2)
    chunked[:] = oracles.normal((4, 6), np.float32)

    def read(file: Path) -> None:
        place = next(parent for parent in file.parents if parent.suffix == ".zarr")
        describe_file(place)
        with open_array("fuzz", place) as array:
            if math.prod(array.shape) < 1000:
                for storage in (None, tnlib.Storage(memory=1e6)):
                    tnlib.tt_svd(array, storage=storage)

    def mutate(rng: Any, content: bytes) -> bytes:
        return mutate_json(rng, content) if content.startswith(b"{") else mutate_bytes(rng, content)

    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".zattrs")
    return Reader(sorted(files), [mutate_bytes, mutate, mutate_zarr], read)


def resume(folder: Path, outside: Path) -> Reader:
    """The folder of an interrupted run, in which the run is resumed."""
    from tnlib.out_of_core.passes import observed_passes

    np.save(folder / "x.npy", oracles.noisy_tucker((40, 24, 30, 8), (3, 4, 5, 2)))
    a = np.load(folder / "x.npy", mmap_mode="r")

    def run(place: Path | None) -> Any:
        return tnlib.tt_svd(a, rtol=1e-2, storage=tnlib.Storage(memory=1e6, folder=place)).value

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "pass 2" and done == total:
            raise KeyError

    with suppress(KeyError), observed_passes(interrupt):
        run(folder / "run")
    want = run(None)

    def read(file: Path) -> None:
        shutil.rmtree(folder / "again", ignore_errors=True)
        shutil.copytree(file.parent, folder / "again")
        oracles.assert_same_bits(run(folder / "again"), want)

    files = (file for file in (folder / "run").iterdir() if file.stat().st_size)
    return Reader(sorted(files), [mutate_bytes, mutate_npz], read)


READERS: dict[str, Callable[[Path, Path], Reader]] = {
    "load": load,
    "claims": claims,
    "safetensors": safetensors,
    "tokenizer": tokenizer,
    "itensor": itensor,
    "tenpy": tenpy,
    "weights": partial(checkpoint, files=["*.safetensors"], mutations=[mutate_bytes, mutate_safetensors]),
    "index": partial(checkpoint, files=["*.index.json"], mutations=[mutate_bytes, mutate_json]),
    "config": partial(checkpoint, files=["config.json"], mutations=[mutate_bytes, mutate_json]),
    "integers": integers,
    "statistics": statistics,
    "npy": npy,
    "zarr": zarr,
    "resume": resume,
}
