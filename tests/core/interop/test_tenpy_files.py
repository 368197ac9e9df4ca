"""HDF5 files: what TeNPy writes is read without it and without trust, and what is written TeNPy loads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import oracles
import pytest
from hypothesis import HealthCheck, assume, given, settings
from physics_states import of_one_charge, operators
from random_trains import trains
from slow_cases import mostly_slow
from tenpy.models.xxz_chain import XXZChain
from tenpy.networks.mps import MPS
from tenpy.networks.purification_mps import PurificationMPS
from tenpy.networks.site import SpinHalfSite
from tenpy.tools import hdf5_io
from tnlib_adapters.interop.tenpy import from_tenpy, read, to_tenpy, write

import tnlib

one_folder = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def train(dtype: Any = np.float64, form: str = "B") -> Any:
    x = of_one_charge([[1, -1]] * 6, 0, dtype)
    state = to_tenpy(tnlib.tt_svd(x).value, SpinHalfSite("Sz"))
    state.convert_form(form)
    return state


def hamiltonian() -> Any:
    return XXZChain({"L": 5, "Jxx": 1.0, "Jz": 0.6, "hz": 0.2, "bc_MPS": "finite"}).H_MPO


@pytest.fixture(scope="module")
def state_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a state with charges, which is not to be written to."""
    path = tmp_path_factory.mktemp("tenpy") / "state.h5"
    hdf5_io.save(train(), str(path))
    return path


@pytest.fixture
def stored(state_file: Path, tmp_path: Path) -> Path:
    """A copy of that file."""
    return Path(shutil.copy(state_file, tmp_path))


@pytest.mark.parametrize("dtype", mostly_slow([np.float64, np.complex128, np.float32, np.complex64], [np.complex64]))
@pytest.mark.parametrize("form", ["A", "B", "C", "G", "Th"])
def test_a_file_is_read_as_its_object_is(form: str, dtype: Any, tmp_path: Path) -> None:
    state = train(dtype, form)
    hdf5_io.save(state, str(tmp_path / "state.h5"))
    oracles.assert_same_bits(read(tmp_path / "state.h5"), from_tenpy(state))


def test_a_file_of_an_operator_is_read_as_its_object_is(tmp_path: Path) -> None:
    hdf5_io.save(hamiltonian(), str(tmp_path / "h.h5"))
    oracles.assert_same_bits(read(tmp_path / "h.h5"), from_tenpy(hamiltonian()))


@pytest.mark.slow
@one_folder
@given(trains() | operators(square=True))
def test_what_is_written_is_read_by_both(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "value.h5"
    assume(isinstance(value, tnlib.TTMatrix) or len(value.cores) > 1)
    write(path, value)  # over the file of the example before
    oracles.assert_close(read(path).full(), value.full(), value.dtype, factor=1e3)
    oracles.assert_same_bits(from_tenpy(hdf5_io.load(str(path))), read(path))


def test_a_file_with_charges_is_written(tmp_path: Path) -> None:
    state = train()
    write(tmp_path / "state.h5", from_tenpy(state), SpinHalfSite("Sz"))
    loaded = hdf5_io.load(str(tmp_path / "state.h5"))
    loaded.test_sanity()
    assert loaded.overlap(state) == pytest.approx(state.norm**2, rel=1e-13)
    assert loaded.sites[0].state_labels["up"] == 1


def test_an_object_inside_of_results_is_found_by_its_key(tmp_path: Path) -> None:
    results = {"energy": -1.0, "psi": train(), "model": {"H": hamiltonian()}}
    hdf5_io.save(results, str(tmp_path / "results.h5"))
    oracles.assert_same_bits(read(tmp_path / "results.h5", name="psi"), from_tenpy(train()))
    oracles.assert_same_bits(read(tmp_path / "results.h5", name="/model/H"), from_tenpy(hamiltonian()))
    with oracles.refused(ValueError, "tenpy.read: ", "MPS or MPO", "energy, model, psi", "name="):
        read(tmp_path / "results.h5")
    with oracles.refused(ValueError, "tenpy.read: ", "'phi'", "no such thing"):
        read(tmp_path / "results.h5", name="phi")
    with oracles.refused(TypeError, "tenpy.read: name", "string"):
        read(tmp_path / "results.h5", name=3)  # type: ignore[arg-type]


def test_legs_stored_compactly_are_read_and_flat_ones_refused(tmp_path: Path) -> None:
    for legs in ("compact", "flat"):
        with h5py.File(tmp_path / f"{legs}.h5", "w") as opened:
            hdf5_io.Hdf5Saver(opened, {"LegCharge": legs}).save(train())
    oracles.assert_same_bits(read(tmp_path / "compact.h5"), from_tenpy(train()))
    with oracles.refused(ValueError, "tenpy.read: ", "format blocks or compact", "'flat'"):
        read(tmp_path / "flat.h5")


def test_files_of_older_versions_are_read(stored: Path) -> None:
    """They have no unit cell, segment boundaries or grouping."""
    with h5py.File(stored, "r+") as opened:
        del opened["unit_cell_width"], opened["segment_boundaries"], opened.attrs["grouped"]
    oracles.assert_same_bits(read(stored), from_tenpy(train()))


def test_objects_that_python_shares_are_read_under_each_name(tmp_path: Path) -> None:
    state = MPS.from_product_state([SpinHalfSite("Sz")] * 4, ["up", "up", "down", "up"], unit_cell_width=4)
    state._B[1] = state._B[0]  # equal ones, as one object
    hdf5_io.save(state, str(tmp_path / "state.h5"))
    with h5py.File(tmp_path / "state.h5") as opened:
        assert opened["tensors/0"].id == opened["tensors/1"].id
        assert opened["singular_values/0"] == opened["singular_values/4"]
    assert np.argwhere(read(tmp_path / "state.h5").full()).tolist() == [[0, 0, 1, 0]]


def test_legs_are_found_by_their_labels(stored: Path) -> None:
    with h5py.File(stored, "r+") as opened:
        for tensor in opened["tensors"].values():
            order = [2, 0, 1]
            for entries in (tensor["labels"], tensor["legs"]):
                moved = [entries[str(k)] for k in order]
                for k in range(3):
                    entries.move(str(k), f"old {k}")
                for k, item in enumerate(moved):
                    entries[str(k)] = item
                for k in range(3):
                    del entries[f"old {k}"]
            for name in list(tensor["blocks"]):
                item = tensor["blocks"][name]
                attrs, data = dict(item.attrs), item[()].transpose(order)
                del tensor["blocks"][name]
                tensor["blocks"][name] = data
                tensor["blocks"][name].attrs.update(attrs)
            tensor["block_inds"][...] = tensor["block_inds"][()][:, order]
    oracles.assert_same_bits(read(stored), from_tenpy(train()))


def test_reading_needs_no_tenpy(stored: Path) -> None:
    code = (
        "import sys; from tnlib_adapters.interop.tenpy import read; "
        f"print(read({str(stored)!r}).ranks, 'tenpy' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split(") ") == ["(1, 2, 4, 8, 4, 2, 1", "False\n"]


# ------------------------------------------------------------------------------------------------ damaged and foreign


def replaced(name: str, data: Any, kind: str | None = "array") -> Callable[[Any], None]:
    def change(opened: Any) -> None:
        del opened[name]
        opened[name] = data
        if kind is not None:
            opened[name].attrs["type"] = kind

    return change


def with_attribute(name: str, key: str, value: Any) -> Callable[[Any], None]:
    return lambda opened: opened[name].attrs.__setitem__(key, value)


def without(name: str) -> Callable[[Any], None]:
    return lambda opened: opened.__delitem__(name)


DAMAGED = {
    "unknown class": (with_attribute("/", "class", "InfiniteMPS"), ["MPS or MPO", "InfiniteMPS"]),
    "class of another module": (with_attribute("/", "module", "os"), ["MPS or MPO"]),
    "no type": (lambda opened: opened.attrs.__delitem__("type"), ["MPS or MPO"]),
    "unknown type of a list": (with_attribute("tensors", "type", "reduce"), ["list, tuple", "'reduce'"]),
    "function for a number": (with_attribute("sites/0/perm", "type", "function"), ["'function'"]),
    "class for a tensor": (with_attribute("tensors/1", "class", "Popen"), ["Array", "Popen"]),
    "no tensors": (without("tensors"), ["'tensors'", "no such thing"]),
    "one tensor less": (without("tensors/5"), ["6 entries", "got 5"]),
    "no norm": (lambda opened: opened.attrs.__delitem__("norm"), ["'norm'", "got None"]),
    "endless list": (with_attribute("tensors", "len", 10**15), ["/tensors", "entries"]),
    "group for a number": (lambda o: (o.__delitem__("sites/0/perm"), o.create_group("sites/0/perm")), ["type"]),
    "block of another shape": (replaced("tensors/2/blocks/0", np.ones((9, 9, 9))), ["fit its legs", "(9, 9, 9)"]),
    "block in no place": (replaced("tensors/2/block_inds", np.full((6, 3), 99)), ["positions", "[99, 99, 99]"]),
    "block before its leg": (replaced("tensors/2/block_inds", np.full((6, 3), -1)), ["positions", "[-1, -1, -1]"]),
    "more places than blocks": (replaced("tensors/2/block_inds", np.zeros((8, 3), int)), ["positions of 6 blocks"]),
    "places that are no integers": (replaced("tensors/2/block_inds", np.zeros((6, 3))), ["integers", "float64"]),
    "empty slices": (replaced("tensors/2/legs/0/slices", np.zeros(0, int)), ["integers", "(0,)"]),
    "form of one power": (
        lambda o: (o["canonical_form/0"].__delitem__("1"), o["canonical_form/0"].attrs.__setitem__("len", 1)),
        ["two powers"],
    ),
    "form beyond measure": (replaced("canonical_form/0/0", 1e300, "float"), ["two powers", "1e+300"]),
    "norm whose modulus overflows": (with_attribute("/", "norm", complex(1e308, 1e308) * 1.5), ["finite norm"]),
    "norm that is text": (with_attribute("/", "norm", "1"), ["'norm'", "'1'"]),
    "grouped that is a list": (with_attribute("/", "grouped", [1, 1]), ["'grouped'"]),
    "legs that go back": (replaced("tensors/2/legs/0/slices", np.array([0, 5, 2])), ["ascending"]),
    "permutation that is none": (replaced("sites/0/perm", np.array([1, 1])), ["a permutation of its entries"]),
    "fewer sites": (with_attribute("sites", "len", 2), ["entries"]),
    "fewer forms": (
        lambda o: (o["canonical_form"].__delitem__("5"), o["canonical_form"].attrs.__setitem__("len", 5)),
        ["a site, a form"],
    ),
    "one singular value for a bond": (
        lambda o: (replaced("singular_values/2", np.ones(1))(o), replaced("canonical_form/1/1", 0.0, "float")(o)),
        ["singular values on bond 2", "got 1"],
    ),
    "infinite": (replaced("boundary_condition", "infinite", "str"), ["finite boundary conditions", "'infinite'"]),
    "NaN": (replaced("tensors/0/blocks/0", np.full((1, 1, 1), np.nan)), ["finite", "nan"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_in_one_sentence(case: str, stored: Path) -> None:
    damage, words = DAMAGED[case]
    with h5py.File(stored, "r+") as opened:
        damage(opened)
    with oracles.refused(tnlib.FileFormatError, "tenpy.read: ", str(stored), *words):
        read(stored)


def test_a_vidal_form_whose_bonds_differ_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.h5"
    write(path, tnlib.vidal(tnlib.tt_svd(np.eye(2)).value))
    with h5py.File(path, "r+") as opened:
        for name in ("tensors/0/blocks/0", "tensors/0/legs/2/slices"):
            attributes, a = dict(opened[name].attrs), opened[name][()]
            del opened[name]
            opened[name] = a[..., :1] if a.ndim == 3 else np.array([0, 1])
            opened[name].attrs.update(attributes)
    with oracles.refused(tnlib.FileFormatError, "tenpy.read: ", str(path), "one size on both sides of every bond"):
        read(path)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    tnlib.save(tmp_path / "ours.h5", tnlib.tt_svd(np.eye(2)).value)
    with h5py.File(tmp_path / "numbers.h5", "w") as opened:
        opened["x"] = np.ones(3)
    purified = PurificationMPS.from_infiniteT([SpinHalfSite(None)] * 2, unit_cell_width=2)
    hdf5_io.save(purified, str(tmp_path / "purified.h5"))
    hdf5_io.save([train()], str(tmp_path / "list.h5"))
    for path in sorted(tmp_path.iterdir()):
        with oracles.refused(tnlib.FileFormatError, "tenpy.read: ", str(path)):
            read(path)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "value.h5"
    path.write_text("old")
    with oracles.refused(TypeError, "tenpy.write: value", "ndarray"):
        write(path, np.eye(2))  # type: ignore[arg-type]
    with oracles.refused(ValueError, "tenpy.write: sites"):
        write(path, tnlib.tt_svd(np.eye(3)).value, SpinHalfSite("Sz"))
    with oracles.refused(ValueError, "tenpy.write: value", "one", "tnlib.save"):
        write(path, tnlib.TensorTrain([np.ones((1, 2, 1))]))  # TeNPy takes the largest of no bonds
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with oracles.refused(FileNotFoundError, "tenpy.write: the folder of path"):
        write(tmp_path / "no folder" / "value.h5", tnlib.tt_svd(np.eye(2)).value)
    with oracles.refused(ValueError, "tenpy.write: path", "folder", str(tmp_path)):
        write(tmp_path, tnlib.tt_svd(np.eye(2)).value)
