"""ITensor files: one that Julia wrote, and files laid out by a plain writer here, in every order that is allowed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from itensor_files import leg, put_chain, put_empty_chain, put_group, put_tensor
from tnlib_adapters.interop import itensor

import tnlib

h5py = pytest.importorskip("h5py")

JULIA = Path(__file__).resolve().parents[4] / "shared" / "data" / "itensor" / "testfilev0.1.41.h5"

# ------------------------------------------------------------------------------------------------- a file from Julia


@pytest.mark.skipif(not JULIA.exists(), reason="the file that Julia wrote is not here")
def test_a_tensor_that_julia_wrote() -> None:
    a = itensor.read(JULIA)
    with h5py.File(JULIA) as file:
        data = file["ITensorv0.1.41/store/data"][()]
    assert a.shape == (2, 3, 4)
    assert a.dtype == np.float64
    for i, j, k in np.ndindex(2, 3, 4):
        assert a[i, j, k] == data[i + 2 * j + 6 * k]


def layout(file: Any) -> dict[str, Any]:
    """Path -> its attributes and dtypes, strings by character set and padding, values of what is no name."""
    found: dict[str, Any] = {}

    def look(path: str, item: Any) -> None:
        attributes = {}
        for key in item.attrs:
            kind = item.attrs.get_id(key).get_type()
            text = isinstance(kind, h5py.h5t.TypeStringID)
            attributes[key] = (
                item.attrs[key],
                str(kind.dtype),
                (kind.get_cset(), kind.get_strpad(), kind.is_variable_str()) if text else None,
            )
        if isinstance(item, h5py.Dataset):
            kind = item.id.get_type()
            text = isinstance(kind, h5py.h5t.TypeStringID)
            value = item[()] if item.size == 1 and not text and not path.endswith("/id") else None
            attributes["data"] = (
                item.shape,
                "text" if text else item.dtype,
                (kind.get_cset(), kind.get_strpad(), kind.is_variable_str()) if text else None,
                value,
            )
        found[path.replace("/store", "/storage")] = attributes

    file.visititems(look)
    return found


@pytest.mark.skipif(not JULIA.exists(), reason="the file that Julia wrote is not here")
def test_files_are_laid_out_as_julia_lays_them_out(tmp_path: Path) -> None:
    itensor.write(tmp_path / "a.h5", itensor.read(JULIA), name="ITensorv0.1.41")
    with h5py.File(JULIA) as theirs, h5py.File(tmp_path / "a.h5") as ours:
        assert layout(ours) == layout(theirs)
        assert np.array_equal(ours["ITensorv0.1.41/storage/data"], theirs["ITensorv0.1.41/store/data"])


def test_complex_numbers_are_pairs_of_fields_as_in_julia(tmp_path: Path) -> None:
    itensor.write(tmp_path / "a.h5", tnlib.TensorTrain([np.ones((1, 2, 1)) * 1j]))
    with h5py.File(tmp_path / "a.h5") as file:
        group = file["psi/MPS[1]/storage"]
        assert group.attrs["type"] == b"Dense{ComplexF64}"
        kind = group["data"].id.get_type()
        assert [kind.get_member_name(i) for i in range(kind.get_nmembers())] == [b"r", b"i"]


# ------------------------------------------------------------------------------------------------------- round trips

shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5)


def chain(shape: Sequence[tuple[int, int, int]], dtype: Any, kind: str, seed: int) -> list[np.ndarray]:
    ranks = [1, *(r for r, _, _ in shape[1:]), 1]
    sites = [(m, n) if kind == "MPO" else (m,) for _, m, n in shape]
    return [oracles.normal((ranks[k], *sites[k], ranks[k + 1]), dtype, seed + k) for k in range(len(shape))]


@pytest.mark.slow
@settings(max_examples=10)
@given(shapes, st.sampled_from(oracles.DTYPES), st.sampled_from(["MPS", "MPO"]), st.integers(0, 99), st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, shape: Any, dtype: Any, kind: str, seed: int, gauged: bool
) -> None:
    path = tmp_path_factory.mktemp("itensor") / "a.h5"
    value = (tnlib.TensorTrain if kind == "MPS" else tnlib.TTMatrix)(chain(shape, dtype, kind, seed))
    if gauged:
        value = tnlib.canonicalize(value, seed % len(shape))
    itensor.write(path, value)
    got = itensor.read(path)
    assert type(got) is type(value)
    assert got.dtype == value.dtype
    for mine, theirs in zip(value.cores, got.cores, strict=True):
        assert np.array_equal(mine, theirs)
    if gauged:
        assert got.center == value.center


@pytest.mark.slow
@given(shapes, st.sampled_from(oracles.DTYPES), st.sampled_from(["MPS", "MPO"]), st.randoms(), st.booleans())
def test_any_order_of_legs(
    tmp_path_factory: pytest.TempPathFactory, shape: Any, dtype: Any, kind: str, random: Any, cpp: bool
) -> None:
    path = tmp_path_factory.mktemp("itensor") / "a.h5"
    cores = chain(shape, dtype, kind, 3)
    with h5py.File(path, "w") as file:
        put_chain(file, "x", cores, order=lambda legs: random.sample(legs, len(legs)), cpp=cpp)
    got = itensor.read(path)
    assert got.dtype == dtype
    for mine, theirs in zip(cores, got.cores, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(0, 99))
def test_blocks_of_quantum_numbers(tmp_path_factory: pytest.TempPathFactory, d: int, seed: int) -> None:
    """A state of d spins with a conserved number of ups: sectors on every leg, most blocks absent."""
    path = tmp_path_factory.mktemp("itensor") / "a.h5"
    rng = np.random.default_rng(seed)
    ups = int(rng.integers(0, d + 1))
    charges = [np.repeat(np.arange(k + 1), rng.integers(1, 3, k + 1)) for k in range(d)] + [np.array([ups])]
    charges[0] = np.array([0])
    cores = []
    for k in range(d):
        allowed = charges[k][:, None, None] + np.arange(2)[:, None] == charges[k + 1]
        cores.append(np.where(allowed, oracles.normal(allowed.shape, np.complex128, seed + k), 0))
    sizes = [np.unique(c, return_counts=True)[1].tolist() for c in charges]
    with h5py.File(path, "w") as file:
        group = put_empty_chain(file, "psi", "MPS", d)
        for k, core in enumerate(cores):
            left = [leg(f"Link,l={k}", core.shape[0], id=k, dir=-1, blocks=sizes[k])] if k else []
            right = [leg(f"Link,l={k + 1}", core.shape[2], id=k + 1, dir=1, blocks=sizes[k + 1])] if k + 1 < d else []
            site = [leg(f"Site,n={k + 1}", 2, id=100 + k, dir=1, blocks=[1, 1])]
            legs = [*right, *site, *left]
            a = core.transpose(2, 1, 0).reshape([one["dim"] for one in legs])
            put_tensor(group, f"MPS[{k + 1}]", a, legs, cpp=seed % 2 == 1)
    got = itensor.read(path)
    for mine, theirs in zip(cores, got.cores, strict=True):
        assert np.array_equal(mine, theirs)


# ------------------------------------------------------------------------------------------------------- what is meant


def test_rows_of_an_operator_are_primed(tmp_path: Path) -> None:
    raising = np.array([[0.0, 1.0], [0.0, 0.0]])
    cores = [raising.reshape(1, 2, 2, 1), np.eye(2).reshape(1, 2, 2, 1)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        put_chain(file, "H", cores, order=lambda legs: legs[::-1])
    assert np.array_equal(itensor.read(tmp_path / "a.h5").full(), np.kron(raising, np.eye(2)))
    itensor.write(tmp_path / "b.h5", tnlib.TTMatrix(cores))
    with h5py.File(tmp_path / "b.h5") as file:
        first = file["H/MPO[1]/inds"]
        assert [int(first[f"index_{n}/plev"][()]) for n in (1, 2)] == [1, 0]
        assert first["index_1/id"][()] == first["index_2/id"][()]


@pytest.mark.slow
def test_states_and_operators_written_apart_share_their_sites_and_nothing_else(tmp_path: Path) -> None:
    state = tnlib.TensorTrain(oracles.random_cores((2, 3, 2), (1, 2, 2, 1)))
    other = tnlib.TensorTrain(oracles.random_cores((2, 3, 2), (1, 2, 2, 1), seed=9))
    operator = tnlib.TTMatrix(chain([(2, 2, 2), (2, 3, 3), (2, 2, 2)], np.float64, "MPO", 0))
    ids = []
    for k, value in enumerate((state, other, operator)):
        itensor.write(tmp_path / f"{k}.h5", value, name="x")
        found: dict[str, set[int]] = {"Site": set(), "Link": set()}
        with h5py.File(tmp_path / f"{k}.h5") as file:

            def look(path: str, item: Any, found: dict[str, set[int]] = found) -> None:
                if path.rpartition("/")[2].startswith("index_"):
                    found[item["tags/tags"][()].decode().split(",")[0]].add(int(item["id"][()]))

            file.visititems(look)
        ids.append(found)
    assert ids[0]["Site"] == ids[1]["Site"] == ids[2]["Site"]
    assert len(set.union(*(f["Link"] for f in ids))) == 6
    before = (tmp_path / "0.h5").read_bytes()
    time.sleep(1.1)  # the clock of HDF5 counts seconds
    itensor.write(tmp_path / "0.h5", state, name="x")
    assert (tmp_path / "0.h5").read_bytes() == before, "the same state gives the same file"


def test_limits_of_orthogonality(tmp_path: Path) -> None:
    state = tnlib.canonicalize(tnlib.TensorTrain(oracles.random_cores((2, 3, 2, 2), (1, 2, 3, 2, 1))), 2)
    itensor.write(tmp_path / "a.h5", state)
    with h5py.File(tmp_path / "a.h5") as file:
        assert (int(file["psi/llim"][()]), int(file["psi/rlim"][()])) == (2, 4)
    with h5py.File(tmp_path / "b.h5", "w") as file:  # a file may say what is not so, and keep silent about what is
        put_chain(file, "lies", oracles.random_cores((2, 3, 2), (1, 2, 2, 1)), limits=(1, 3))
        put_chain(file, "silent", state.cores)
    assert itensor.read(tmp_path / "b.h5", name="lies").center is None
    assert itensor.read(tmp_path / "b.h5", name="silent").center == 2


def test_the_centre_of_a_product_state_is_the_one_that_the_file_names(tmp_path: Path) -> None:
    cores = [np.array([0.6, 0.8]).reshape(1, 2, 1)] * 4
    for center in range(4):
        itensor.write(tmp_path / "a.h5", tnlib.TensorTrain(cores, center))
        assert itensor.read(tmp_path / "a.h5").center == center


@pytest.mark.parametrize("center", [None, 1])
def test_the_scale_goes_into_the_cores(center: int | None, tmp_path: Path) -> None:
    cores = tnlib.canonicalize(tnlib.TensorTrain(oracles.random_cores((2, 3, 2), (1, 2, 2, 1))), 1).cores
    value = tnlib.TensorTrain(cores, center, 600.0)
    itensor.write(tmp_path / "a.h5", value)
    got = itensor.read(tmp_path / "a.h5")
    assert got.center == center
    assert tnlib.distance(got, value) <= 1e-14 * value.norm()
    with oracles.refused(ValueError, "itensor.write: value must fit float64", "log_norm()", "divide"):
        itensor.write(tmp_path / "b.h5", tnlib.TensorTrain(cores, center, 4e3))
    assert not (tmp_path / "b.h5").exists()


def test_bonds_of_several_legs_and_ends_of_size_one(tmp_path: Path) -> None:
    a, b = oracles.normal((2, 3, 2)), oracles.normal((3, 4, 2), seed=1)
    p, q = leg("Link,p", 2, id=9), leg("Link,q", 3, id=3)
    end = leg("Link,l=0", 1, id=50)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = put_empty_chain(file, "psi", "MPS", 2)
        put_tensor(group, "MPS[1]", a[..., None], [leg("Site,n=1", 2, id=1), q, p, end])
        put_tensor(group, "MPS[2]", b.T, [p, leg("Site,n=2", 4, id=2), q])
    want = np.einsum("iqp,qjp->ij", a, b)
    oracles.assert_close(itensor.read(tmp_path / "a.h5").full(), want)


def test_tensors_without_a_link_between_them(tmp_path: Path) -> None:
    a, b = oracles.normal((2,)), oracles.normal((3,), seed=1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = put_empty_chain(file, "psi", "MPS", 2)
        put_tensor(group, "MPS[1]", a, [leg("Site,n=1", 2, id=1)])
        put_tensor(group, "MPS[2]", b.astype(complex), [leg("Site,n=2", 3, id=2)])
    got = itensor.read(tmp_path / "a.h5")
    assert got.ranks == (1, 1, 1)
    assert got.dtype == np.complex128
    assert np.array_equal(got.full(), np.multiply.outer(a, b))


# ------------------------------------------------------------------------------------------------------------ refusals


def test_which_of_several(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        put_chain(file, "psi", oracles.random_cores((2, 3), (1, 2, 1)))
        put_chain(file, "phi", oracles.random_cores((4, 3), (1, 2, 1)))
        put_group(file, "sites", "SiteSet")
    assert itensor.read(tmp_path / "a.h5", name="phi").shape == (4, 3)
    with oracles.refused(ValueError, "itensor.read: ", "['phi', 'psi']", "name='phi'"):
        itensor.read(tmp_path / "a.h5")
    for name in ("chi", "sites", "psi/MPS[1]/inds"):
        with oracles.refused(ValueError, "itensor.read: ", f"named {name!r}", "['phi', 'psi']"):
            itensor.read(tmp_path / "a.h5", name=name)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        put_group(file, "sites", "SiteSet")
    with oracles.refused(ValueError, "itensor.read: ", "must hold one MPS, MPO or ITensor", "SiteSet"):
        itensor.read(tmp_path / "b.h5")


def change(path: Path, where: str, what: Any) -> None:
    """Change one attribute (after a dot) or dataset, or delete it."""
    with h5py.File(path, "r+") as file:
        group, _, attribute = where.partition(".")
        if attribute:
            file[group].attrs[attribute] = what
        else:
            del file[group]
            if what is not None:
                file[group] = what


@pytest.fixture
def good(tmp_path: Path) -> Path:
    itensor.write(tmp_path / "good.h5", tnlib.TensorTrain(oracles.random_cores((2, 3, 2), (1, 2, 2, 1))))
    return tmp_path / "good.h5"


@pytest.mark.parametrize(
    "kind", ["run(`id`)", "Dense{Int64}", "EmptyStorage{Float64}", "", "Dense{Float64}; exit()", "Diag{Float64}"]
)
def test_an_unknown_type_of_storage_is_refused_and_never_evaluated(good: Path, kind: str) -> None:
    change(good, "psi/MPS[2]/storage.type", kind)
    with oracles.refused(ValueError, "itensor.read: /psi/MPS[2]/storage", "Dense{Float64}", repr(kind)):
        itensor.read(good)


@pytest.mark.parametrize(
    ("where", "what", "says"),
    [
        ("psi/MPS[1].type", "MPO", "must have type 'ITensor'"),
        ("psi.version", 2, "version 1"),
        ("psi/MPS[1]/inds.type", "Index", "must have type 'IndexSet'"),
        ("psi/MPS[1]/inds/index_1.space_type", "Fermions", "space_type"),
        ("psi/MPS[1]/inds/index_1/dim", -1, "positive dim"),
        ("psi/MPS[1]/inds/index_1/dim", 5, "must hold 10 numbers"),
        ("psi/MPS[1]/inds/index_1/dim", 2**40, "at most"),
        ("psi/MPS[1]/inds/index_1/dim", 2.0, "one integer"),
        ("psi/MPS[1]/storage/data", np.ones(3), "must hold 4 numbers"),
        ("psi/MPS[1]/storage/data", np.ones((2, 2)), "must hold a vector of float64"),
        ("psi/MPS[1]/storage/data", np.ones(4, "f4"), "must hold a vector of float64"),
        ("psi/MPS[1]/storage/data", None, "data"),
        ("psi/MPS[1]/inds/index_2/id", np.uint64(5), "site leg on every tensor"),
        ("psi/MPS[3]", None, "MPS[3]"),
        ("psi/length", 2**60, "MPS[4]"),
        ("psi/length", 0, "non-empty"),
        ("psi/llim", None, "llim"),
    ],
)
def test_a_damaged_file(good: Path, where: str, what: Any, says: str) -> None:
    change(good, where, what)
    with oracles.refused(tnlib.FileFormatError, "itensor.read: ", str(good), says):
        itensor.read(good)


def test_chains_that_are_not_open(tmp_path: Path) -> None:
    loop = [leg("Link,l=1", 2, id=1), leg("Link,l=2", 2, id=2), leg("Link,l=0", 2, id=3)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = put_empty_chain(file, "psi", "MPS", 3)
        for k in range(3):
            put_tensor(group, f"MPS[{k + 1}]", np.ones((2, 2, 2)), [loop[k - 1], leg("Site", 2, id=10 + k), loop[k]])
    with oracles.refused(ValueError, "itensor.read: /psi", "must be an open chain", "'Link,l=0' in tensors 1, 3"):
        itensor.read(tmp_path / "a.h5")


def test_operators_whose_rows_are_not_told_from_columns(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = put_empty_chain(file, "H", "MPO", 1)
        put_tensor(group, "MPO[1]", np.ones((2, 2)), [leg("Site,n=1", 2, id=1), leg("Site,n=1", 2, id=2)])
    with oracles.refused(ValueError, "itensor.read: /H", "must prime its row legs"):
        itensor.read(tmp_path / "a.h5")


def test_two_precisions(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = put_empty_chain(file, "psi", "MPS", 2)
        put_tensor(group, "MPS[1]", np.ones(2, "f4"), [leg("Site,n=1", 2, id=1)])
        put_tensor(group, "MPS[2]", np.ones(2), [leg("Site,n=2", 2, id=2)])
    with oracles.refused(ValueError, "itensor.read: ", "one precision", "float32 and float64"):
        itensor.read(tmp_path / "a.h5")


@pytest.mark.parametrize("offsets", [[3, 1, 0], [0, 1, 0], [1, 1, -1], [1, 1, 4], [1, 1], [2**62, 1, 0]])
def test_blocks_that_are_not_there(tmp_path: Path, offsets: list[int]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        legs = [leg("Site,n=1", 4, id=1, blocks=[2, 2]), leg("Site,n=2", 2, id=2, blocks=[2])]
        store = put_tensor(file, "T", np.zeros((4, 2)), legs)["storage"]
        del store["offsets"], store["data"]
        store["offsets"], store["data"] = offsets, np.ones(4)
    with oracles.refused(ValueError, "itensor.read: /T/storage", "block"):
        itensor.read(tmp_path / "a.h5")


def test_values_that_itensor_does_not_have(tmp_path: Path) -> None:
    tucker = tnlib.tucker(np.ones((2, 3))).value
    vidal = tnlib.vidal(tnlib.tt_svd(np.ones((2, 3))).value)
    for value, hint in ((tucker, "tnlib.convert"), (vidal, "value.train()"), ([1.0], "decompose"), (None, "decompose")):
        with oracles.refused(TypeError, "itensor.write: value must be", type(value).__name__, hint):
            itensor.write(tmp_path / "a.h5", value)
    with oracles.refused(ValueError, "itensor.write: value must be finite"):
        itensor.write(tmp_path / "a.h5", np.array([np.nan]))
    for name in ("", "a/b", ".", 3):
        with oracles.refused(TypeError, "itensor.write: name"):
            itensor.write(tmp_path / "a.h5", np.ones(2), name=name)
    with oracles.refused(FileNotFoundError, "itensor.write: ", "folder"):
        itensor.write(tmp_path / "no" / "a.h5", np.ones(2))
    assert os.listdir(tmp_path) == []
