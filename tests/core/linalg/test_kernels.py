"""Kernels against plain numpy: odd sizes, NaN, and the conditions under which they compile, are cached and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tnlib.linalg.kernels import add_gram, times_rows

ROOT = Path(__file__).resolve().parents[3]
READS = [np.float32, np.float64]


def padded(n: int) -> int:
    return -(-n // 4) * 4


def gram_by_kernel(a: np.ndarray, width: int = 16) -> np.ndarray:
    p, m, n = a.shape
    out = np.zeros((padded(m), padded(m)))
    add_gram(a, (0, p), (0, n), width, out)
    return out


def assert_upper(out: np.ndarray, want: np.ndarray) -> None:
    """The tiles on and above the diagonal hold `want`; nothing was written beside it."""
    m = len(want)
    assert not out[m:].any()
    assert not out[:, m:].any()
    oracles.assert_close(np.triu(out[:m, :m]), np.triu(want))


@given(
    p=st.integers(1, 5), m=st.integers(1, 10), n=st.integers(1, 40), width=st.integers(1, 24),
    single=st.booleans(), data=st.data(),
)  # fmt: skip
def test_gram_of_parts_that_are_added_is_that_of_the_whole(
    p: int, m: int, n: int, width: int, single: bool, data: Any
) -> None:
    """Threads take ranges of slabs or of columns, of any length, none too."""
    a = oracles.normal((p, m, n), np.float32 if single else np.float64, seed=m + 10 * n)
    slab, column = data.draw(st.integers(0, p)), data.draw(st.integers(0, n))
    out = np.zeros((padded(m), padded(m)))
    with oracles.unchanged(a):
        for slabs in ((0, slab), (slab, p)):
            for columns in ((0, column), (column, n)):
                add_gram(a, slabs, columns, width, out)
    assert_upper(out, np.einsum("pik,pjk->ij", oracles.wide(a), oracles.wide(a)))


def test_sums_of_single_precision_are_taken_in_double() -> None:
    a = np.full((1, 2, 100_003), 0.1, np.float32)
    want = 100_003 * float(np.float32(0.1)) ** 2
    np.testing.assert_allclose(gram_by_kernel(a, width=256)[0, :2], want, rtol=1e-13)
    ones = np.full((4, 100_003), 0.1, np.float32)
    out = np.zeros((4, 4))
    times_rows(ones, ones.astype(np.float64), 1024, out)
    np.testing.assert_allclose(out, want, rtol=1e-13)


@pytest.mark.parametrize("dtype", READS)
@pytest.mark.parametrize("m", [4, 8, 12])
@pytest.mark.parametrize("l", [4, 8])
@pytest.mark.parametrize("n", [1, 3, 16, 17, 50])
def test_thin_products(dtype: type, m: int, l: int, n: int) -> None:
    a, b = oracles.normal((m, n), dtype), oracles.normal((l, n), seed=1)
    out = np.zeros((m, l))
    with oracles.unchanged(a, b):
        times_rows(a, b, 16, out)
    oracles.assert_close(out, oracles.wide(a) @ b.T)
    times_rows(a, b, 16, out)
    oracles.assert_close(out, 2 * oracles.wide(a) @ b.T)


@pytest.mark.filterwarnings("ignore:invalid value")  # which numpy's scalars say where nothing is compiled
@pytest.mark.parametrize("dtype", READS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_the_sums(dtype: type, bad: float) -> None:
    """Sums in any order must not take "there is no NaN" for granted."""
    for place in ((0, 0, 0), (1, 2, 20), (0, 4, 32)):
        a = oracles.normal((2, 5, 33), dtype)
        a[place] = bad
        out = gram_by_kernel(a)[:5, :5]
        touched = np.zeros((5, 5), bool)
        touched[place[1]] = touched[:, place[1]] = True
        np.testing.assert_array_equal(~np.isfinite(np.triu(out)), np.triu(touched))
        out = np.zeros((4, 4))
        times_rows(a[0, 1:], a[1, 1:].astype(np.float64), 16, out)
        row = np.zeros((4, 4), bool)
        if place[1] > 0:
            index = place[1] - 1
            row[index if place[0] == 0 else slice(None), index if place[0] == 1 else slice(None)] = True
        np.testing.assert_array_equal(~np.isfinite(out), row)


@pytest.mark.parametrize("dtype", READS)
def test_squares_that_leave_single_precision_do_not_overflow(dtype: type) -> None:
    a = np.full((1, 4, 20), 1e30, dtype)
    np.testing.assert_allclose(np.triu(gram_by_kernel(a)), np.triu(np.full((4, 4), 20 * float(a[0, 0, 0]) ** 2)))


def test_read_only_and_unaligned_input() -> None:
    want = oracles.normal((2, 5, 19))
    frozen = want.copy()
    frozen.flags.writeable = False
    raw = np.zeros(want.nbytes + 1, np.uint8)
    shifted = raw[1:].view(np.float64).reshape(want.shape)
    shifted[...] = want
    assert not shifted.flags.aligned
    for a in (frozen, shifted):
        assert_upper(gram_by_kernel(a), np.einsum("pik,pjk->ij", want, want))


# ----------------------------------------------------------------------------------------- in processes of their own

# Compares the kernels with numpy, for the dtypes that DTYPES names.
CHECK = """
import numpy as np
from tnlib.linalg.kernels import add_gram, times_rows

rng = np.random.default_rng(0)
for dtype in DTYPES:
    for p, m, n in ((1, 3, 9), (2, 5, 21), (3, 8, 16), (4, 1, 1)):
        a = rng.standard_normal((p, m, n)).astype(dtype)
        out = np.zeros((-(-m // 4) * 4,) * 2)
        add_gram(a, (0, p), (0, n), 8, out)
        want = np.einsum("pik,pjk->ij", a.astype(float), a.astype(float))
        assert np.abs(np.triu(out[:m, :m] - want)).max() <= 1e-13 * np.abs(want).max()
    a, b = rng.standard_normal((8, 13)).astype(dtype), rng.standard_normal((4, 13))
    out = np.zeros((8, 4))
    times_rows(a, b, 8, out)
    assert np.abs(out - a.astype(float) @ b.T).max() <= 1e-13
"""
EVERY = CHECK.replace("DTYPES", '("float64", "float32")')
DOUBLE = CHECK.replace("DTYPES", '("float64",)')
COUNT = "\nprint(sum(sum(one.stats.cache_misses.values()) for one in add_gram.compiled.values()))"  # compiled anew


def environment(**changes: str) -> dict[str, str]:
    """That of this process without settings of numba, the checkout importable, and `changes`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return kept | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"} | changes


def start(script: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "error", "-c", script],
        env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


def test_kernels_are_plain_python_where_compilation_is_off() -> None:
    script = EVERY + "\nimport types; print(*{type(one) is types.FunctionType for one in add_gram.compiled.values()})"
    assert finish(start(script, NUMBA_DISABLE_JIT="1")) == "True"


@pytest.mark.slow
def test_no_kernel_leaves_its_arrays(tmp_path: Path) -> None:
    """With a cache of its own: what numba cached without checks it would load, and nothing would be checked."""
    script = (
        DOUBLE
        + """
try:
    add_gram(np.ones((1, 5, 3)), (0, 1), (0, 3), 8, np.zeros((4, 4)))  # out has no room for five rows
except IndexError:
    print("checked")
"""
    )
    assert finish(start(script, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path))) == "checked"


@pytest.mark.slow
def test_kernels_work_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """Every place numba knows lies below a regular file, which stops root too."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "tnlib", tree / "tnlib", ignore=shutil.ignore_patterns("__pycache__"))
    blocked = tree / "tnlib" / "linalg" / "__pycache__"
    blocked.write_text("a file where a folder is wanted")
    script = (
        DOUBLE
        + """
import tnlib
print(tnlib.__file__, next(iter(add_gram.compiled.values())).stats.cache_path, sep="\\n")
"""
    )
    places = {name: str(blocked / "below") for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    out = finish(start(script, PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", **places))
    assert out.splitlines() == [str(tree / "tnlib" / "__init__.py"), "None"]
    assert blocked.is_file()


@pytest.mark.slow
def test_a_folder_for_the_cache_that_is_not_one_is_passed_over(tmp_path: Path) -> None:
    """NUMBA_CACHE_DIR below a regular file: numba takes the next place that it knows."""
    (tmp_path / "file").write_text("")
    finish(start(DOUBLE, NUMBA_CACHE_DIR=str(tmp_path / "file" / "below"), HOME=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("others", ["float64", "float32"])
def test_processes_that_compile_at_once_share_a_cache(others: str, tmp_path: Path) -> None:
    """For one dtype or for two, whose code must not be mixed up."""
    scripts = [CHECK.replace("DTYPES", f'("{dtype}",)') for dtype in ("float64", others)]
    for process in [start(script, NUMBA_CACHE_DIR=str(tmp_path)) for script in scripts]:
        finish(process)
    script = CHECK.replace("DTYPES", f'("float64", "{others}")') + COUNT
    assert finish(start(script, NUMBA_CACHE_DIR=str(tmp_path))) == "0"
    assert not list(tmp_path.rglob("*.tmp.*"))
