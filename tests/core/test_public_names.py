"""The table of contents: its names, what importing it costs, and the signatures that others rely on."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tnlib_adapters

import tnlib

# name -> parameters as "name", "name=default" or "name=" for a default of the library's own choice; "*" as in Python
PINNED = {
    "svd": ["a", "*", "left=None", "rtol=None", "max_rank=None"],
    "tt_svd": ["x", "*", "rtol=None", "max_rank=None"],
    "ttm_svd": ["a", "row_shape", "col_shape", "*", "rtol=None", "max_rank=None"],
    "tucker": ["x", "*", "rtol=None", "ranks=None", "n_iter=0", "max_rank=None"],
    "cp": ["x", "rank", "*", "rtol=", "n_iter=", "n_starts=1", "rng=None", "constraint=None"],
    "tt_cross": ["f", "shape", "*", "rtol", "max_calls=", "rng=None"],
    "round": ["t", "*", "rtol=None", "max_rank=None"],
    "canonicalize": ["tt", "center"],
    "vidal": ["tt"],
    "schmidt_values": ["tt", "bond"],
    "entropy": ["tt", "bond"],
    "inner": ["a", "b"],
    "save": ["path", "value"],
    "load": ["path"],
    "draw": ["value"],
}
MAY_GROW = PINNED.keys() - {"save", "load"}  # by keywords with defaults

FORMATS = {
    "SVD": ["u", "s", "vh"],
    "LowRank": ["left", "right"],
    "TensorTrain": ["cores"],
    "TTMatrix": ["cores"],
    "Tucker": ["core", "factors"],
    "CP": ["weights", "factors"],
    "KroneckerTerms": ["left", "right"],
}
EVERY_FORMAT = ["shape", "dtype", "ranks", "n_parameters", "full", "norm", "__array__"]
EVERY_OPERATOR = ["matvec", "rmatvec", "matmat", "rmatmat", "__matmul__", "__rmatmul__"]


INTEROP = [tnlib.interop, tnlib.interop.quimb]
ADAPTERS = [tnlib_adapters, tnlib_adapters.circuits]
PACKAGES = [tnlib, tnlib.drawing, *INTEROP, *ADAPTERS]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_name_is_where_the_stub_says_and_documented(package: ModuleType) -> None:
    imports = [n for n in ast.parse(Path(package.__file__).with_suffix(".pyi").read_text()).body if hasattr(n, "names")]
    stated = {alias.name: node.module for node in imports for alias in node.names}
    assert set(stated) == set(package.__all__) <= set(dir(package))
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(alias.asname == alias.name for node in imports for alias in node.names), "write `import X as X`"
    for name, module in stated.items():
        value = getattr(package, name)
        assert module is None or value.__module__ == f"{package.__name__}.{module}"
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_other_names_do_not() -> None:
    with pytest.raises(AttributeError, match="No tnlib attribute svd_"):
        tnlib.svd_  # noqa: B018


def test_star_import_and_version() -> None:
    namespace: dict[str, object] = {}
    exec("from tnlib import *", namespace)
    assert set(tnlib.__all__) <= namespace.keys()
    assert tnlib.__version__.count(".") == 2


@pytest.mark.parametrize(
    "statement", ["import tnlib", "import tnlib; dir(tnlib); tnlib.__version__", "import tnlib; tnlib.TnlibError"]
)
def test_importing_costs_nothing(statement: str) -> None:
    heavy = ["numba", "scipy.linalg", "quimb", "tensorly", "matplotlib", "torch", "transformers", "safetensors", "h5py"]
    code = f"import sys; {statement}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def spelled(name: str) -> list[str]:
    words: list[str] = []
    for parameter in inspect.signature(getattr(tnlib, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        words.append(parameter.name + default)
    return words


@pytest.mark.parametrize("name", PINNED)
def test_pinned_signatures(name: str) -> None:
    got, want = spelled(name), PINNED[name]
    if name in MAY_GROW:
        assert all("=" in word or word == "*" for word in got[len(want) :]), "a new parameter needs a default"
        got = got[: len(want)]
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one == other or (other.endswith("=") and one.startswith(other)), f"{name}: {one}, pinned {other}"


@pytest.mark.parametrize("name", FORMATS)
def test_pinned_formats(name: str) -> None:
    cls = getattr(tnlib, name)
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    fields = [f.name for f in dataclasses.fields(cls)]
    assert fields[: len(FORMATS[name])] == FORMATS[name]
    others = list(inspect.signature(cls).parameters.values())[len(FORMATS[name]) :]
    assert all(parameter.default is not parameter.empty for parameter in others)
    for attribute in EVERY_FORMAT + (EVERY_OPERATOR if name in ("LowRank", "TTMatrix", "KroneckerTerms") else []):
        assert hasattr(cls, attribute), f"{name} has no {attribute}"
    assert name != "KroneckerTerms" or hasattr(cls, "apply")


def test_pinned_results() -> None:
    assert [f.name for f in dataclasses.fields(tnlib.Fit)][:5] == ["value", "error", "certified", "converged", "n_iter"]


def test_messages_are_one_line_whatever_they_quote() -> None:
    with pytest.raises(tnlib.ArgumentTypeError) as caught:
        tnlib.svd([[1.0]], max_rank=[[1], [2]] @ np.ones((1, 3)))  # type: ignore[arg-type]
    assert "got array([[1., 1., 1.], [2., 2., 2.]])" in str(caught.value)
    again = pickle.loads(pickle.dumps(tnlib.MissingFileError("there is\n    none")))
    assert (type(again), str(again)) == (tnlib.MissingFileError, "there is none")
