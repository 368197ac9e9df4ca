"""The commands `tnlib decompose` and `tnlib info`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracles
import pytest
from click.testing import CliRunner
from tnlib_adapters.cli import main

import tnlib


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    return done.exit_code, done.output


@pytest.mark.parametrize("kind", ["tt", "tucker", "svd", "cp"])
def test_files_of_numpy(kind: str, tmp_path: Path) -> None:
    x = oracles.random_cp((4000, 30) if kind == "svd" else (20, 30, 40), 2)
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "out.safetensors"
    limit = ("--rank", 2) if kind == "cp" else ("--rtol", 1e-6)
    status, text = run("decompose", tmp_path / "x.npy", out, "--format", kind, *limit, "--memory", "400K")
    assert status == 0, text
    assert "certified" in text
    assert oracles.true_error(x, tnlib.load(out)) <= 1e-6
    status, text = run("info", out)
    assert status == 0
    assert "ranks" in text
    status, text = run("decompose", tmp_path / "x.npy", out, "--format", kind, *limit)
    assert status == 2
    assert "--force" in text


def test_files_of_hdf5_and_zarr(tmp_path: Path) -> None:
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    x = oracles.random_cp((20, 30, 40), 2)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/b"] = x
    zarr.create_array(str(tmp_path / "x.zarr"), shape=x.shape, chunks=(10, 10, 10), dtype="f8")[...] = x
    for k, name in enumerate((f"{tmp_path / 'x.h5'}:/a/b", tmp_path / "x.zarr")):
        out = tmp_path / f"{k}.safetensors"
        assert run("decompose", name, out, "--rtol", 1e-6, "--memory", "400K")[0] == 0
        assert oracles.true_error(x, tnlib.load(out)) <= 1e-6
        assert "20 x 30 x 40" in run("info", name)[1]
    status, text = run("decompose", tmp_path / "x.h5", tmp_path / "new")
    assert status == 2
    assert "/a/b" in text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01\x00", b"text"])
def test_files_that_are_none(content: bytes | None, tmp_path: Path) -> None:
    for suffix in ("npy", "h5", "zarr", "txt"):
        path = tmp_path / f"x.{suffix}"
        if content is not None:
            path.write_bytes(content)
        for command in (("info", path), ("decompose", path, tmp_path / "out")):
            status, text = run(*command)
            assert status == 2
            assert text.startswith("Error: ")
            assert "Traceback" not in text
    assert not (tmp_path / "out").exists()
