"""Files of a release agree: versions, and the dependencies of the conda recipe."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import tnlib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_file_has_the_version() -> None:
    version = PROJECT["version"]
    assert tnlib.__version__ == version
    assert f"\nversion: {version}\n" in text("CITATION.cff")
    assert f'set version = "{version}"' in text("conda-recipe/meta.yaml")
    assert re.search(r"^## (\S+)", text("CHANGELOG.md"), flags=re.MULTILINE)[1] == version  # type: ignore[index]


def test_the_recipe_has_the_dependencies_of_the_package() -> None:
    recipe = text("conda-recipe/meta.yaml")
    run = recipe[recipe.index("  run:") : recipe.index("test:")]
    names = re.findall(r"^    - (\S+) >=(\S+)$", run, flags=re.MULTILINE)
    needed = [tuple(line.split(">=")) for line in [f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]]]
    assert [(name.replace("matplotlib-base", "matplotlib"), version) for name, version in names] == needed
    assert PROJECT["scripts"]["tnlib"] in recipe


def test_workflows_run_what_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.MULTILINE))
    commands = [re.findall(r"run: make ([a-z-]+)", file.read_text()) for file in (ROOT / ".github").rglob("*.yml")]
    assert {target for found in commands for target in found} <= targets
