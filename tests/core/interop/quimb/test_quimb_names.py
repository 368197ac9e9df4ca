"""The public names of tnlib.interop.quimb, and what importing them costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tnlib
from tnlib.interop import quimb


def test_the_stub_and_the_package_name_the_same() -> None:
    stub = ast.parse(Path(quimb.__file__).with_suffix(".pyi").read_text())
    named = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named == set(quimb.__all__) <= set(dir(quimb))
    assert tnlib.interop.quimb is quimb
    assert all(getattr(quimb, name).__doc__ for name in quimb.__all__)
    with pytest.raises(AttributeError, match=r"No tnlib\.interop\.quimb attribute contractt"):
        quimb.contractt  # noqa: B018


def test_importing_the_package_does_not_import_quimb() -> None:
    code = "import sys, tnlib.interop.quimb; sys.exit('quimb' in sys.modules or 'cotengra' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
