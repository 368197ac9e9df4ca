"""HDF5 files of others: nothing outside of them is opened, and they take no more memory than they hold."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from itensor_files import leg, put_chain, put_tensor
from slow_cases import mostly_slow
from tnlib_adapters.interop import itensor, tenpy

import tnlib

h5py = pytest.importorskip("h5py")

SECRET = np.arange(1.0, 5.0)


def state() -> tnlib.TensorTrain:
    return tnlib.TensorTrain(oracles.random_cores((2, 3, 2), (1, 2, 2, 1)))


def write_tenpy(path: Path, value: Any) -> None:
    pytest.importorskip("tenpy")
    tenpy.write(path, value)


# library -> its reader, its writer, and a dataset of four numbers in the file
LIBRARIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "itensor": (itensor.read, itensor.write, "psi/MPS[1]/storage/data"),
    "tenpy": (tenpy.read, write_tenpy, "tensors/0/blocks/0"),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stored(library: str, tmp_path: Path) -> Path:
    LIBRARIES[library][1](tmp_path / "state.h5", state())
    return tmp_path / "state.h5"


def put(path: Path, name: str, add: Callable[[Any, str, Any], None]) -> None:
    """Replace a dataset by what `add(file, name, old values)` makes, with the old attributes."""
    with h5py.File(path, "r+") as opened:
        old, attributes = opened[name][()], dict(opened[name].attrs)
        del opened[name]
        add(opened, name, old)
        if opened.get(name, getclass=True, getlink=True) is h5py.HardLink:
            opened[name].attrs.update(attributes)


def external_storage(secret: Path) -> Callable[[Any, str, Any], None]:
    return lambda o, name, a: o.create_dataset(name, a.shape, a.dtype, external=[(str(secret), 0, a.nbytes)])


def virtual_dataset(secret: Path) -> Callable[[Any, str, Any], None]:
    def add(opened: Any, name: str, a: Any) -> None:
        layout = h5py.VirtualLayout(a.shape, a.dtype)
        layout[...] = h5py.VirtualSource(str(secret), "x", a.shape)
        opened.create_virtual_dataset(name, layout)

    return add


def external_link(secret: Path) -> Callable[[Any, str, Any], None]:
    return lambda o, name, a: o.__setitem__(name, h5py.ExternalLink(str(secret), "x"))


def soft_link(secret: Path) -> Callable[[Any, str, Any], None]:
    def add(opened: Any, name: str, a: Any) -> None:
        opened["elsewhere"] = h5py.ExternalLink(str(secret), "/")
        opened[name] = h5py.SoftLink("/elsewhere/x")

    return add


LEAKS = {make.__name__: make for make in (external_storage, virtual_dataset, external_link, soft_link)}


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("secret", ["HDF5 file", "raw bytes", "pipe"])
def test_numbers_in_other_files_are_refused(library: str, stored: Path, leak: str, secret: str, tmp_path: Path) -> None:
    """Opening the pipe would block for ever."""
    other = tmp_path / "secret"
    read, _, name = LIBRARIES[library]
    if secret == "pipe":
        os.mkfifo(other)
    elif secret == "raw bytes":
        other.write_bytes(SECRET.tobytes())
    else:
        with h5py.File(stored) as opened, h5py.File(other, "w") as file:
            file["x"] = np.resize(SECRET, opened[name].shape)
    put(stored, name, LEAKS[leak](other))
    with oracles.refused(tnlib.FileFormatError, f"{library}.read: ", str(stored), name.rpartition("/")[2], "elsewhere"):
        read(stored)


def test_a_link_at_the_top_is_refused_where_it_is_asked_for(library: str, stored: Path, tmp_path: Path) -> None:
    read, write, _ = LIBRARIES[library]
    write(tmp_path / "other.h5", state())
    with h5py.File(stored, "r+") as opened:
        opened["linked"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "psi" if library == "itensor" else "/")
    assert read(stored).shape == (2, 3, 2)
    with oracles.refused(tnlib.FileFormatError, f"{library}.read: ", "linked"):
        read(stored, name="linked")


# ------------------------------------------------------------------------------------------------------------ memory


def unwritten(opened: Any, name: str, a: Any) -> None:
    opened.create_dataset(name, (1 << 20,) * a.ndim, a.dtype)


def unwritten_chunks(opened: Any, name: str, a: Any) -> None:
    opened.create_dataset(name, (1 << 20,) * a.ndim, a.dtype, chunks=(2,) * a.ndim)


def zeros_by_deflate(opened: Any, name: str, a: Any) -> None:
    opened.create_dataset(name, data=np.zeros((1 << 24,) + (1,) * (a.ndim - 1)), compression=9, chunks=True)


def chunk_that_inflates(opened: Any, name: str, a: Any) -> None:
    """HDF5 inflates a chunk to its end, and then looks at the size of the dataset."""
    data = opened.create_dataset(name, a.shape, a.dtype, chunks=a.shape, compression=9)
    data.id.write_direct_chunk((0,) * a.ndim, zlib.compress(a.tobytes() + bytes(1 << 27), 9))


def chunk_larger_than_the_data(opened: Any, name: str, a: Any) -> None:
    data = opened.create_dataset(
        name, a.shape, a.dtype, chunks=(1 << 24,) + (1,) * (a.ndim - 1), maxshape=(None,) * a.ndim, compression=9
    )
    data[...] = a


def filtered_twice(opened: Any, name: str, a: Any) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(a.shape)
    for _ in range(2):
        properties.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
    space = h5py.h5s.create_simple(a.shape)
    h5py.h5d.create(opened.id, name.encode(), h5py.h5t.py_create(a.dtype), space, properties)
    opened[name][...] = a


BOMBS = {
    make.__name__: make
    for make in (
        *(unwritten, unwritten_chunks, zeros_by_deflate),
        *(chunk_that_inflates, chunk_larger_than_the_data, filtered_twice),
    )
}
LIMIT = 64 << 20  # bytes beyond ten times the size of the file

READ = """
import resource, sys
import numpy as np, tnlib
from tnlib_adapters.interop import itensor, tenpy
library, path, limit = sys.argv[1:]
import h5py
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(limit),) * 2)
try:
    {"itensor": itensor, "tenpy": tenpy}[library].read(path)
except tnlib.FileFormatError as problem:
    print("refused:", problem)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of the process is read as Linux tells it")
@pytest.mark.parametrize("bomb", mostly_slow(BOMBS, ["unwritten_chunks", "filtered_twice"]))
def test_a_small_file_takes_little_memory(library: str, stored: Path, bomb: str) -> None:
    put(stored, LIBRARIES[library][2], BOMBS[bomb])
    assert stored.stat().st_size < 1 << 20
    code = [sys.executable, "-c", READ, library, str(stored), str(LIMIT)]
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run(code, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert done.stdout.startswith(f"refused: {library}.read: "), done.stdout + done.stderr
    assert str(stored) in done.stdout
    assert "MemoryError" not in done.stdout, "it was allocated"


@pytest.mark.parametrize("options", [{"compression": 4}, {"compression": 4, "shuffle": True, "fletcher32": True}, {}])
def test_compressed_numbers_are_read(library: str, stored: Path, options: dict[str, Any]) -> None:
    read, _, name = LIBRARIES[library]
    before = read(stored)
    put(stored, name, lambda o, n, a: o.create_dataset(n, data=a, chunks=a.shape, **options))
    oracles.assert_same_bits(read(stored), before)


@pytest.mark.slow
def test_one_tensor_under_many_names_counts_each_time(tmp_path: Path) -> None:
    """A hundred names of one tensor of a megabyte would be a hundred megabytes."""
    path = tmp_path / "state.h5"
    itensor.write(path, tnlib.TensorTrain([np.ones((1, 1 << 17, 1))] + [np.ones((1, 2, 1))] * 99))
    with h5py.File(path, "r+") as opened:
        for k in range(2, 101):
            del opened[f"psi/MPS[{k}]"]
            opened[f"psi/MPS[{k}]"] = opened["psi/MPS[1]"]
    with oracles.refused(tnlib.FileFormatError, "itensor.read: ", "at most", "as a file of this size may"):
        itensor.read(path)


def test_legs_beyond_what_the_blocks_fill(tmp_path: Path) -> None:
    """Two blocks in the corners of a matrix of 10^10 entries."""
    with h5py.File(tmp_path / "a.h5", "w") as opened:
        legs = [leg(f"Site,n={k}", 100_000, id=k, blocks=[99_999, 1]) for k in (1, 2)]
        small = [one | {"dim": 2, "blocks": [1, 1]} for one in legs]
        group = put_tensor(opened, "T", np.eye(2), small)
        for k, one in enumerate(legs, start=1):
            group[f"inds/index_{k}/dim"][...] = one["dim"]
            group[f"inds/index_{k}/space/dims"][...] = one["blocks"]
    with oracles.refused(tnlib.FileFormatError, "itensor.read: ", "when it is dense", "truncate"):
        itensor.read(tmp_path / "a.h5")


def test_more_legs_than_an_array_has(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as opened:
        put_tensor(opened, "T", np.ones((1,) * 20), [leg("Site", 1, id=k) for k in range(20)])
        inds = opened["T/inds"]
        for k in range(21, 101):
            inds[f"index_{k}"] = inds["index_1"]
        inds["length"][...] = 100
    with oracles.refused(tnlib.FileFormatError, "itensor.read: ", "at most 32 legs"):
        itensor.read(tmp_path / "a.h5")


@pytest.mark.parametrize("bad", [np.nan, np.inf, complex(1, -np.inf)])
@pytest.mark.parametrize("kind", ["tensor", "state", "blocks"])
def test_nan_and_inf_in_itensor_storage_are_refused(kind: str, bad: complex, tmp_path: Path) -> None:
    dtype = complex if isinstance(bad, complex) else float
    a = np.eye(2, dtype=dtype)
    a[1, 1] = bad
    with h5py.File(tmp_path / "a.h5", "w") as opened:
        if kind == "state":
            put_chain(opened, "psi", [a[None], np.ones((2, 2, 1), dtype)])
        else:
            put_tensor(opened, "T", a, [leg("S", 2, id=k, blocks=[1, 1] if kind == "blocks" else []) for k in (1, 2)])
    with oracles.refused(tnlib.FileFormatError, "itensor.read: ", "storage/data", "must be finite", "at index"):
        itensor.read(tmp_path / "a.h5")


# -------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("kind", ["free space of no bytes", "many heaps in one"])
def test_strings_in_a_heap_without_end_are_refused(kind: str, tmp_path: Path) -> None:
    """HDF5 reads the first for ever."""
    path = tmp_path / "state.h5"
    with h5py.File(path, "w") as opened:  # h5py writes strings of variable length, as C++ may
        put_chain(opened, "psi", oracles.random_cores((2, 3), (1, 2, 1)))
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL")
    if kind == "many heaps in one":
        for start in range(heap + 512, heap + 4000, 16):
            data[start : start + 16] = data[heap : heap + 16]
    else:
        data[heap + 16 : heap + 32] = bytes(16)
    path.write_bytes(bytes(data))
    code = f"from tnlib_adapters.interop import itensor; itensor.read({str(path)!r})"
    environment = os.environ | {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert "FileFormatError: itensor.read: " in done.stderr


# ----------------------------------------------------------------------------------------------- defects are not damage


@pytest.mark.parametrize("defect", [KeyError, TypeError, MemoryError, IndexError, AttributeError, ZeroDivisionError])
def test_an_error_of_the_reader_is_not_reported_as_a_damaged_file(
    library: str, stored: Path, defect: type[Exception]
) -> None:
    from tnlib.interop.safe_hdf5 import open_hdf5

    with pytest.raises(defect, match="a defect"), open_hdf5(f"{library}.read", stored):
        raise defect("a defect")


def test_a_file_cut_short_is_refused_wherever_it_is_cut(library: str, stored: Path) -> None:
    whole = stored.read_bytes()
    for length in range(0, len(whole), 1024):
        stored.write_bytes(whole[:length])
        with oracles.refused(tnlib.FileFormatError, f"{library}.read: ", str(stored)):
            LIBRARIES[library][0](stored)


def test_files_of_another_kind_are_refused(library: str, stored: Path) -> None:
    """Pipes are not waited for."""
    read, folder = LIBRARIES[library][0], stored.parent
    stored.write_bytes(b"PK\x03\x04" + stored.read_bytes())
    with oracles.refused(tnlib.FileFormatError, f"{library}.read: ", "not an HDF5 file"):
        read(stored)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("pipe")
    for name in ("pipe", "link", "absent"):
        with oracles.refused(FileNotFoundError, f"{library}.read: ", "found none"):
            read(folder / name)
    with oracles.refused(TypeError, f"{library}.read: path must be a path"):
        read(3)


def test_the_mode_of_a_written_file_is_kept(library: str, stored: Path) -> None:
    stored.chmod(0o600)
    LIBRARIES[library][1](stored, state())
    assert stored.stat().st_mode & 0o777 == 0o600
    os.mkfifo(stored.with_name("pipe"))
    with oracles.refused(ValueError, f"{library}.write: path must name a regular file"):
        LIBRARIES[library][1](stored.with_name("pipe"), state())
