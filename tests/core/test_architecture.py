"""Imports point down one list of layers, wherever in a file they stand; there is no cycle."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"tnlib": ROOT, "tnlib_adapters": ROOT / "adapters"}

# The registry finds formats by the names of their packages, which lie above.
NAMES_PACKAGES = ("tnlib._registry",)

LAYERS = [
    ["tnlib._errors", "tnlib._typing"],
    ["tnlib._validate", "tnlib._files", "tnlib._html"],
    ["tnlib._array_api", "tnlib._fit", "tnlib._registry"],
    ["tnlib._stored_arrays", "tnlib._operands"],
    ["tnlib._format"],
    ["tnlib.linalg.kernels"],
    ["tnlib.linalg"],
    ["tnlib.out_of_core"],
    ["tnlib.drawing"],
    ["tnlib.formats.train"],
    ["tnlib.formats.tucker"],
    ["tnlib.formats.cp"],
    ["tnlib.formats.matrix"],
    ["tnlib.formats"],
    ["tnlib.ops", "tnlib.random"],
    ["tnlib.io"],
    ["tnlib.interop"],
    ["tnlib"],
    ["tnlib_adapters.data", "tnlib_adapters.html_page", "tnlib_adapters.interop", "tnlib_adapters.result_table"],
    ["tnlib_adapters.architectures"],
    ["tnlib_adapters.files"],
    ["tnlib_adapters.factors"],
    ["tnlib_adapters.attention"],
    ["tnlib_adapters.checkpoints"],
    ["tnlib_adapters.transformers_plugin"],
    ["tnlib_adapters.reference", "tnlib_adapters.transforms", "tnlib_adapters.instrument"],
    ["tnlib_adapters.frozen"],
    ["tnlib_adapters.circuits", "tnlib_adapters.compression"],
    ["tnlib_adapters.inspection"],
    ["tnlib_adapters.demo", "tnlib_adapters.demo_cached"],
    ["tnlib_adapters.cli_options", "tnlib_adapters.cli_session"],
    ["tnlib_adapters.cli"],
    ["tnlib_adapters"],
]


@functools.cache
def layer(module: str) -> int | None:
    """Number of the layer whose name is the longest start of `module`; a root stands for itself alone."""
    found = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if module == name or (name not in PACKAGES and module.startswith(name + "."))
    ]
    return max(found)[1] if found else None


def find_modules(roots: dict[str, Path]) -> dict[str, Path]:
    modules = {}
    for package, base in roots.items():
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file; every test reads them."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def references(path: Path) -> list[ast.AST]:
    """Imports and strings "module:name" of a file and its stub."""
    stub = path.with_suffix(".pyi")
    return [
        node
        for node in (*nodes_of(path), *(nodes_of(stub) if stub.exists() else ()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tnlib"))
    ]


def imported(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules that a file, and its stub, name in imports at any depth and in references "module:name"."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in references(path):
        if isinstance(node, ast.Constant):
            if name not in NAMES_PACKAGES and (found := re.match(r"(tnlib\w*\.[\w.]*)(:\w+|$)", node.value)):
                yield from {found[1]} & modules.keys()
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                child = f"{base}.{alias.name}"
                yield child if child in modules else base


def ours(name: str, path: Path, modules: dict[str, Path]) -> list[str]:
    return [i for i in imported(name, path, modules) if i.split(".")[0] in PACKAGES]


def upward(modules: dict[str, Path]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, path in modules.items()
        if name not in PACKAGES
        for other in ours(name, path, modules)
        if (layer(other) if layer(other) is not None else -1) > (layer(name) if layer(name) is not None else -1)
    ]


def roots_imported(modules: dict[str, Path]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, path in modules.items()
        for other in ours(name, path, modules)
        if other == name.split(".")[0]
    ]


def import_graph(modules: dict[str, Path]) -> dict[str, list[str]]:
    return {n: [i for i in dict.fromkeys(ours(n, p, modules)) if i in modules and i != n] for n, p in modules.items()}


def folder_graph(modules: dict[str, Path], package: str) -> dict[str, list[str]]:
    """Imports between the folders of a package; files beside the folders do not count."""
    depth = package.count(".") + 2
    graph: dict[str, list[str]] = {
        name: [] for name, path in modules.items() if path.name == "__init__.py" and name.rpartition(".")[0] == package
    }
    for name, others in import_graph(modules).items():
        own, *found = (".".join(module.split(".")[:depth]) for module in (name, *others))
        if own in graph:
            graph[own] += [other for other in found if other in graph and other != own]
    return graph


def find_cycle(graph: dict[str, list[str]]) -> list[str]:
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name not in done:
            for other in graph[name]:
                if cycle := visit(other, [*trail, name]):
                    return cycle
            done.add(name)
        return []

    return next((cycle for name in graph if (cycle := visit(name, []))), [])


def public(path: Path) -> set[str]:
    """Names that a package offers: what its stub, or its own file, imports and defines."""
    names: set[str] = set()
    stub = path.with_suffix(".pyi")
    for node in ast.parse((stub if stub.exists() else path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            itself = isinstance(node, ast.ImportFrom) and node.level and not node.module  # from . import module
            names |= set() if itself else {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def hidden(modules: dict[str, Path]) -> list[str]:
    """Public names of packages that a module inside has too: whichever was loaded last would be found."""
    packages = {name: path for name, path in modules.items() if path.name == "__init__.py"}
    return [
        other
        for package, path in packages.items()
        for other in modules
        if other.rpartition(".")[0] == package and other.rpartition(".")[2] in public(path)
    ]


MODULES = find_modules(PACKAGES)


def test_all_modules_are_found() -> None:
    assert {
        "tnlib",
        "tnlib.io",
        "tnlib.linalg.thin_svd",
        "tnlib.formats.train.format",
        "tnlib.formats.cp.decomposition",
    } <= MODULES.keys()


def test_every_module_has_a_place() -> None:
    homeless = [name for name in MODULES if layer(name) is None]
    assert homeless == [], "give each of these a layer in LAYERS"


def test_imports_point_down() -> None:
    assert upward(MODULES) == []


def test_no_module_imports_the_root_of_its_package() -> None:
    assert roots_imported(MODULES) == []


def test_no_cycle() -> None:
    assert find_cycle(import_graph(MODULES)) == []


@pytest.mark.parametrize("package", [f"tnlib_adapters.{name}" for name in ("attention", "circuits", "compression")])
def test_no_cycle_of_folders(package: str) -> None:
    assert find_cycle(folder_graph(MODULES, package)) == []


def test_no_module_hides_a_public_name() -> None:
    assert hidden(MODULES) == [], "rename each of these files"


def test_models_are_read_through_their_wiring() -> None:
    assert row_readers(MODULES) == [], "read checkpoint.wiring"


def test_configs_are_read_in_one_place() -> None:
    assert config_readers(MODULES) == [], "read the settings that config_keys.read_settings returns"


def test_the_library_knows_nothing_of_transformers() -> None:
    foreign = {"torch", "transformers", "tnlib_adapters", "click", "rich"}
    found = {
        f"{name} imports {other}"
        for name, path in MODULES.items()
        if name.split(".")[0] == "tnlib"
        for other in imported(name, path, MODULES)
        if other.split(".")[0] in foreign
    }
    assert found == set()


def row_readers(modules: dict[str, Path]) -> list[str]:
    """Modules that read rows of the architecture table and are not there to: the wiring holds what rows say.

    Messages may print an attribute `architecture`.
    """
    rows = {
        f"tnlib_adapters.architectures.{name}"
        for name in ("architecture", "table", "config_keys", "layer_settings", "rope")
    }
    allowed = ("tnlib_adapters.architectures.", "tnlib_adapters.checkpoints.checkpoint")
    readers = []
    for name, path in modules.items():
        if name.startswith(allowed) or not name.startswith("tnlib_adapters."):
            continue
        nodes = nodes_of(path)
        printed = [node.value for node in nodes if isinstance(node, ast.FormattedValue)]
        reads = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "architecture"]
        if rows & {*ours(name, path, modules)} or any(node not in printed for node in reads):
            readers.append(name)
    return readers


def config_readers(modules: dict[str, Path]) -> list[str]:
    """Modules that look up a key in something called config, `x.config` or `some_config`; writing a key is allowed."""
    allowed = ("tnlib_adapters.architectures.config_keys", "tnlib_adapters.factors.config_section")
    readers = []
    for name, path in modules.items():
        if name in allowed or not name.startswith("tnlib_adapters."):
            continue
        for node in nodes_of(path):
            is_lookup = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
            is_method = isinstance(node, ast.Attribute) and node.attr in ("get", "items", "keys", "pop", "values")
            if isinstance(node, ast.Subscript | ast.Attribute) and (is_lookup or is_method):
                of = getattr(node.value, "attr", getattr(node.value, "id", ""))
                readers += [name] if of.lower().endswith("config") else []
    return readers


# file -> its text, and the module that it must not import
BAD = {
    "tnlib/linalg/bad.py": ("from tnlib.formats.cp.format import CP", "tnlib.formats.cp.format"),
    "tnlib/linalg/in_a_function.py": ("def f():\n    import tnlib.ops.round", "tnlib.ops.round"),
    "tnlib/linalg/relative.py": ("from ..formats import cp", "tnlib.formats.cp"),
    "tnlib/formats/train/bad.py": ("register('tnlib.formats.train:A', round='tnlib.formats.cp:f')", "tnlib.formats.cp"),
    "tnlib/linalg/stub.pyi": ("from tnlib.formats import cp", "tnlib.formats.cp"),
    "tnlib/io.py": ("from tnlib_adapters.checkpoints import modified", "tnlib_adapters.checkpoints"),
    "adapters/tnlib_adapters/transformers_plugin/hooks.py": (
        "from tnlib_adapters.instrument.running_model import M",
        "tnlib_adapters.instrument.running_model",
    ),
}


def write_modules(root: Path, package: str, texts: dict[str, str]) -> dict[str, Path]:
    """Write files, named without their suffix .py, below `package`, and find all modules."""
    for name, text in texts.items():
        file = root / package / (name if "." in name else f"{name}.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return find_modules({"tnlib": root, "tnlib_adapters": root / "adapters"})


@pytest.mark.parametrize("case", BAD)
def test_an_import_that_points_up_is_found(case: str, tmp_path: Path) -> None:
    text, other = BAD[case]
    empty = ["tnlib/formats/__init__", "tnlib/formats/cp", "tnlib/linalg/stub"]
    name = case.removeprefix("adapters/").rpartition(".")[0].replace("/", ".")
    assert f"{name} imports {other}" in upward(write_modules(tmp_path, "", dict.fromkeys(empty, "") | {case: text}))


def test_a_module_that_reads_a_row_is_found(tmp_path: Path) -> None:
    texts = {
        "architectures/table": "",
        "circuits/import_of_the_table": "from tnlib_adapters.architectures.table import ARCHITECTURES",
        "circuits/attribute": "def f(checkpoint):\n    row = checkpoint.architecture\n    return row.stored",
        "circuits/message": "def f(weights):\n    return f'a {weights.architecture}'",
    }
    readers = row_readers(write_modules(tmp_path, "adapters/tnlib_adapters", texts))
    assert readers == ["tnlib_adapters.circuits.attribute", "tnlib_adapters.circuits.import_of_the_table"]


def test_a_module_that_reads_a_config_is_found(tmp_path: Path) -> None:
    texts = {
        "get": "def f(config):\n    return config.get('a')",
        "lookup": "def f(checkpoint):\n    return checkpoint.config['a']",
        "module": "def f(model):\n    return model.text_config['a']",
        "write": "def f(config, a):\n    config['a'] = a\n    return {**config}",
        "settings": "def f(settings):\n    return settings['a']",
    }
    readers = config_readers(write_modules(tmp_path, "adapters/tnlib_adapters/circuits", texts))
    assert readers == [f"tnlib_adapters.circuits.{name}" for name in ("get", "lookup", "module")]


def test_cycles_and_roots_are_found(tmp_path: Path) -> None:
    texts = {"a": "def f():\n    from tnlib.linalg import b", "b": "import tnlib.linalg.a", "c": "import tnlib"}
    modules = write_modules(tmp_path, "tnlib/linalg", texts)
    assert sorted(set(find_cycle(import_graph(modules)))) == ["tnlib.linalg.a", "tnlib.linalg.b"]
    assert roots_imported(modules) == ["tnlib.linalg.c imports tnlib"]


def test_a_cycle_of_folders_is_found(tmp_path: Path) -> None:
    texts = {
        "linalg/__init__": "",
        "linalg/a/__init__": "",
        "linalg/a/x": "def f():\n    from tnlib.linalg.b import y",
        "linalg/a/z": "from tnlib.linalg import c",
        "linalg/b/__init__": "",
        "linalg/b/y": "from tnlib.linalg import c",
        "linalg/b/w": "from tnlib.linalg.a import z",
        "linalg/c": "from tnlib.linalg.d import e",
        "linalg/d/__init__": "",
        "linalg/d/e": "",
    }
    modules = write_modules(tmp_path, "tnlib", texts)
    assert find_cycle(import_graph(modules)) == []
    assert sorted(set(find_cycle(folder_graph(modules, "tnlib.linalg")))) == ["tnlib.linalg.a", "tnlib.linalg.b"]
    assert find_cycle(folder_graph(modules, "tnlib")) == []


def test_a_module_that_hides_a_public_name_is_found(tmp_path: Path) -> None:
    texts = {
        "__init__": "from tnlib.ops.b import c",
        "ops/__init__": "",
        "ops/__init__.pyi": "from . import c as c\nfrom .a import a\nfrom .d import b",
        **dict.fromkeys(["c", "ops/a", "ops/b", "ops/c"], ""),
    }
    assert hidden(write_modules(tmp_path, "tnlib", texts)) == ["tnlib.c", "tnlib.ops.a", "tnlib.ops.b"]
