"""Pages of the documentation: examples run, pictures are current, links lead somewhere, public names are listed."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import pkgutil
import re
import tempfile
from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
import pytest
import tnlib_adapters
from command_line import run_command
from compressed_folders import leave_out_pictures
from html_pages import differ
from tnlib_adapters import interop

import tnlib
from benchmarks.smollm2 import smollm2

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
# of several seconds
SLOW = (
    "gallery",
    "physics",
    "networks",
    "how-to/choose-rank-and-bits",
    "how-to/decompose-zarr",
    "induction-heads-of-a-gpt-2",
    "circuit-of-a-language-model",
    "heads-of-a-language-model",
    "circuits",
    "inspect.md",
    "compare-two-checkpoints",
    "a-state-from-dmrg",
    "functions-on-binary-digits",
)


def test_the_page_on_compression_shows_the_table_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out_pictures(monkeypatch)
    result = run_command("compress", "builtin-llama", tmp_path / "out", "--keep", "0.5", columns=100)
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    table = printed[: next(k for k, line in enumerate(printed) if line.startswith("all weights on disk")) + 1]
    shown = "\n".join(f"    {line}" for line in table)
    assert len(table) > 8
    assert shown in (ROOT / "docs" / "compress.md").read_text(encoding="utf-8")


def test_the_first_table_of_the_readme_has_the_numbers_of_the_pages() -> None:
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    rounding, trains, operators = re.findall(
        r"^\| (?:round|TT-SVD|attention scores) .*$", texts["README.md"], re.MULTILINE
    )
    study = re.search(
        r"^\| 3\.5 \| [^|]* \| ([\d.]+) \((\d\.\d\d)\).*\n\| 3\.0 \| ([\d.]+) /",
        texts["docs/study-bits.md"],
        re.MULTILINE,
    )
    assert study is not None
    for number in (*study.groups(), "3.00 bits"):
        assert number in rounding
    benchmarks = texts["docs/benchmarks-speed.md"]
    cells = benchmarks[benchmarks.index("## tt24") : benchmarks.index("## tt32")]
    for library, name in (("**tnlib**", "0"), ("TeNPy", "TeNPy: "), ("quimb, Gram mode", "quimb by Gram matrices: ")):
        seconds = re.search(rf"^\| {re.escape(library)} \| ([\d.]+) \|", cells, re.MULTILINE)
        assert seconds is not None
        assert (seconds[1] if name == "0" else name + seconds[1]) + " s" in trains
    rows = [line.split(" | ") for line in texts["docs/architectures.md"].splitlines() if line.startswith("| ")]
    errors = [float(cell) for row in rows[1:] for cell in row[4:7] if re.fullmatch(r"\de-\d\d", cell)]
    assert f"{len(rows) - 1} small models" in operators
    assert f"largest relative error {max(errors):.0e}" in operators


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.startswith(SLOW) else [])
        for page in (page.removeprefix("docs/") for page in PAGES if page.startswith("docs/"))
        if ">>>" in (ROOT / "docs" / page).read_text(encoding="utf-8")
    ],
)
def test_examples_on_the_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the gallery leaves its pictures
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testfile(str(ROOT / "docs" / page), module_relative=False, optionflags=options)
    assert result.attempted > 0
    assert result.failed == 0
    drawn = {path.name: path for path in tmp_path.rglob("*.*")}
    if page == "drawing.md":
        _must_be_current({f"draw-{name}": path for name, path in drawn.items()})
    if page.startswith("gallery"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        shown = re.findall(r"!\[[^]]+\]\(pictures/([^)]+)\)", text)
        assert sorted(shown) == sorted(drawn)  # each drawn by the page, each shown
        _must_be_current(drawn)


def calls_of_rows(text: str) -> list[list[str]]:
    """Return the code in the last cell of every row of a page that chooses functions."""
    cells = re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE)
    return [[call for call in re.findall(r"`([^`]*)`", cell) if re.search(r"[(=]|\w\.\w", call)] for cell in cells]


@pytest.mark.filterwarnings("ignore::tnlib.ConvergenceWarning")  # cp at a rank above that of the array
def test_calls_of_the_tables_of_arrays_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.einsum("i,j,k", *(np.arange(1.0, n) for n in (7, 8, 9)))
    t = tnlib.random.tensor_train((32, 8, 16), 3, rng=0)
    points = np.stack(np.unravel_index(np.arange(0, x.size, 5), x.shape), axis=1)
    names: dict[str, object] = {"np": np, "tnlib": tnlib, "interop": interop, "x": x, "t": t, "a": t, "b": t}
    names |= {"matrix": np.eye(36), "rows": (6, 6), "columns": (6, 6), "missing": x == 12.0, "file": {"u": x}}
    names |= {"shape": x.shape, "points": points, "values": x[tuple(points.T)], "slabs": [np.ones((50, 64, 64))] * 2}
    names |= {"first": tnlib.cp(x, rank=2).value, "second": tnlib.cp(x, rank=2, rng=1).value}
    names |= {
        "f": lambda i: i.sum(axis=1),
        "g": np.sin,
        "G": np.add,
        "index": (1, 2, 3),
        "weights": [np.ones(n) for n in t.shape],
    }
    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    calls = calls_of_rows(text[text.index("## Arrays") : text.index("## Not here")])
    assert sum(map(len, calls)) > 40
    for row in calls:
        own = dict(names)
        for call in row:
            exec(call, own)


def test_calls_of_the_table_of_states_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sz, lower = np.diag([0.5, -0.5]), np.array([[0.0, 0.0], [1.0, 0.0]])
    psi, phi = (tnlib.tt_svd(x / np.linalg.norm(x)).value for x in np.random.default_rng(0).random((2, *(2,) * 8)))
    interop.itensor.write("psi.h5", psi)
    names: dict[str, object] = {"np": np, "tnlib": tnlib, "interop": interop, "psi": psi, "phi": phi, "sz": sz}
    names |= {
        "H": tnlib.embed(sz, 3, psi.shape),
        "vector": psi.full().ravel(),
        "matrix": np.eye(256),
        "cores": [core.copy() for core in psi.cores],
        "torch": pytest.importorskip("torch"),
        "J": np.ones((8, 8)),
        "gate": np.eye(4),
        "w": 1e-10,
    }
    names |= {
        "sp": lower.T,
        "sm": lower,
        "s": 2 * sz,
        "a": lower,
        "core": np.random.default_rng(0).random((3, 2, 3)),
        "b": sz,
        "i": 1,
        "j": 5,
        "state": interop.quimb.to_quimb(psi),
        "mps": interop.tenpy.to_tenpy(psi),
    }
    names["mps"].sites[0].add_op("Sz", sz)  # type: ignore[attr-defined]
    text = (ROOT / "docs" / "choose-states.md").read_text(encoding="utf-8")
    calls = [call for row in calls_of_rows(text) for call in row]
    assert len(calls) > 70
    for call in calls:
        exec(call, names)


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    if not notebook.stem.endswith("of-a-language-model"):  # whose outputs the pages show; make docs runs the others
        assert not any(cell.get("outputs") for cell in cells)
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else [], id=path.stem) for path in TUTORIALS],
)
def test_cells_of_a_tutorial_run(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if notebook.stem.endswith("of-a-language-model") and smollm2() is None:
        pytest.skip("needs SmolLM2: python -m benchmarks.smollm2")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {}
    for cell in code_cells(notebook):
        exec(compile(cell, notebook.name, "exec"), names)
    assert len(names) > 5


def test_every_page_is_in_a_table_of_contents() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^[a-z][\w/-]*$", text, flags=re.MULTILINE))
    pages = {page.removeprefix("docs/").removesuffix(".md") for page in PAGES if page.startswith("docs/")}
    pages |= {f"tutorials/{notebook.stem}" for notebook in TUTORIALS}
    assert listed == {page for page in pages if not page.startswith("gallery-")} - {"index"}


def _must_be_current(drawn: dict[str, Path]) -> None:
    """Compare pictures with those of the pages, which the matplotlib of the lock file drew."""
    locked = re.search(r"^matplotlib==(\d+\.\d+)", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE)
    if locked is None or not matplotlib.__version__.startswith(f"{locked[1]}."):
        return
    off = {name: differ(path, ROOT / "docs" / "pictures" / name) for name, path in drawn.items()}
    assert {name: how for name, how in off.items() if how} == {}, "draw these anew; make docs draws the gallery"


@pytest.mark.slow
def test_a_picture_that_is_not_current_is_found(tmp_path: Path) -> None:
    for name, value in {"a": np.eye(3), "b": np.eye(4), "c": np.ones((3, 3))}.items():  # another size, another shape
        tnlib.draw(tnlib.svd(value).value).save(tmp_path / f"{name}.svg")
        tnlib.draw(tnlib.svd(value).value).save(tmp_path / f"{name}.png")
    for kind in ("svg", "png"):
        a, b, c = (tmp_path / f"{name}.{kind}" for name in "abc")
        assert not differ(a, a)
        assert differ(a, b)
        assert differ(a, c)
    moved = tmp_path / "moved.svg"
    moved.write_text(re.sub(r'width="[0-9.]+', 'width="1', (tmp_path / "a.svg").read_text()))
    assert differ(tmp_path / "a.svg", moved)
    moved.write_text(re.sub(r"(?<=L )\d+\.\d+", lambda x: f"{float(x[0]) + 1e-6}", (tmp_path / "a.svg").read_text()))
    assert moved.read_text() != (tmp_path / "a.svg").read_text()
    assert not differ(tmp_path / "a.svg", moved)


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_left_half_written(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not any(word in text for word in ("MEASURED", "TODO", "TBD", "XXX"))


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (folder / target).exists(), f"{page} links to {target}"


def test_every_picture_has_an_alternative_text_and_a_caption() -> None:
    shown = set()
    for page in PAGES:
        if not page.startswith("docs/"):
            continue
        text = (ROOT / page).read_text(encoding="utf-8")
        for picture in re.finditer(r"!\[([^]]*)\]\(([^)]+)\)", text):
            alternative, path = picture.groups()
            assert len(alternative.split()) >= 3, f"{page} does not say what {path} is"
            caption = re.match(r"\n\n\*([A-Z][^*]+\.)\*\n(\n|$)", text[picture.end() :] + "\n")
            assert caption, f"{page} does not say in italics below {path} what to see in it"
            assert caption[1] != alternative
            shown.add(path.rpartition("/")[2])
    assert shown == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}


def test_diagrams_fit_into_the_column_of_text() -> None:
    """Labels have 9 points, and are smaller where the browser shrinks a diagram."""
    widths = {
        path.name: float(re.findall(r'<svg [^>]*width="([\d.]+)pt"', path.read_text(encoding="utf-8"))[0])
        for path in (ROOT / "docs" / "pictures").glob("*.svg")
    }
    assert len(widths) > 50
    assert {name: width for name, width in widths.items() if width > 640} == {}


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_formulas_are_rendered_by_the_site_and_by_others(page: str) -> None:
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    formulas = re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", text, flags=re.DOTALL)
    assert text.count("$") == sum(4 if block else 2 for block, _ in formulas)
    for block, inline in formulas:
        formula = block or inline
        assert formula.count("{") == formula.count("}"), formula
        assert not re.search(r"\\(tilde|hat|bar) ?\w[_^]", formula), f"an index below the accent in {formula}"
        assert not re.search(r"\\[\\,;!_{}]", formula), f"Markdown on other sites takes the backslash from {formula}"


def test_every_notion_of_the_gallery_is_found_by_its_name() -> None:
    index = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((gallery-[a-z]+\.md)#([^)]+)\)", index))
    there = set()
    for page in (ROOT / "docs").glob("gallery-*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^##+ (.+)$", text, flags=re.MULTILINE)
        there |= {(page.name, re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")) for title in titles}
    assert len(there) > 60
    assert linked == there


API = ("api.md", "api-adapters.md", "api-circuits.md")


def public_names() -> dict[str, object]:
    """The names in the lists of the pages `API`, as users type them, and their values."""
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in API)
    names = re.findall(r"^   (tnlib\S*)$", text, flags=re.MULTILINE)
    assert len(set(names)) == len(names) > 150
    return {name: pkgutil.resolve_name(name) for name in names}


@pytest.mark.parametrize(
    "package", [tnlib, tnlib.drawing, tnlib.interop.quimb, tnlib_adapters, tnlib_adapters.circuits]
)
def test_every_public_name_is_on_the_page_of_functions(package: ModuleType) -> None:
    values = {name: getattr(package, name) for name in package.__all__ if not name.startswith("__")}
    listed = list(map(id, public_names().values()))
    defined = {name: value for name, value in values.items() if not isinstance(value, ModuleType)}
    assert [name for name, value in defined.items() if id(value) not in listed] == []


def test_every_conversion_of_a_library_is_on_the_page_of_functions() -> None:
    modules = [module for module in vars(interop).values() if isinstance(module, ModuleType)]
    functions = [pair for module in modules for pair in inspect.getmembers(module, inspect.isfunction)]
    converters = {function for name, function in functions if re.match("(from|to)_|(read|write)$", name)}
    assert len(converters) >= 20
    assert converters <= {value for value in public_names().values() if inspect.isfunction(value)}


@pytest.mark.parametrize("page", PAGES)
def test_examples_fit_beside_the_margins(page: str) -> None:
    lines = re.findall(r"^(?:>>>|\.\.\.) (.*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [line for line in lines if len(line) > 88] == []


@pytest.mark.parametrize("folder", ["tnlib", "adapters"])
def test_examples_in_docstrings_fit_beside_the_margins(folder: str) -> None:
    paths = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).rglob("*.py"))]
    lines = [
        (path, line)
        for path in paths
        for line in re.findall(r"^ *((?:>>>|\.\.\.) .*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(lines) > 400
    assert [(path, line) for path, line in lines if len(line) > 88] == []


def test_every_random_format_is_on_the_page_of_functions() -> None:
    functions = inspect.getmembers(tnlib.random, inspect.isfunction)
    names = [name for name, f in functions if f.__module__ == "tnlib.random" and not name.startswith("_")]
    assert len(names) >= 5
    assert {f"tnlib.random.{name}" for name in names} <= public_names().keys()


def examples_of(value: object) -> str:
    """The section of examples in the docstring of a value itself, not of a base class."""
    return inspect.cleandoc(value.__doc__ or "").partition("\nExamples\n---")[2]


def test_every_public_function_and_class_has_an_example() -> None:
    values = public_names()
    assert sum(map(inspect.isfunction, values.values())) > 150
    assert sum(map(inspect.isclass, values.values())) > 90
    assert [name for name, value in values.items() if not examples_of(value)] == []


def test_the_example_of_a_public_function_or_class_shows_a_number() -> None:
    parser = doctest.DocTestParser()
    examples = {name: parser.get_examples(examples_of(value)) for name, value in public_names().items()}
    shown = {name: "".join(example.want for example in of_name) for name, of_name in examples.items()}
    assert [name for name, output in shown.items() if not re.search(r"\d", output)] == []


def test_the_page_on_the_layout_names_files_and_layers_that_exist() -> None:
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / "tnlib").rglob("*.py*")}
    folders = {path.parent.name for path in (ROOT / "tnlib").rglob("*.py")} - {"tnlib"}
    tree = text[text.index("    tnlib/\n") : text.index("    adapters/")]
    assert set(re.findall(r"\w+\.pyi?\b", tree)) <= files
    assert [folder for folder in folders if f"{folder}/" not in tree] == []
    layers = ast.parse((ROOT / "tests" / "core" / "test_architecture.py").read_text(encoding="utf-8"))
    (stated,) = (
        ast.literal_eval(node.value)
        for node in layers.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    rows = ["  ".join(names) for names in stated if not names[0].startswith("tnlib_adapters")]
    assert "".join(f"    {row}\n" for row in rows) in text


# numbers of the prose that are no measurements: versions, and heads by their names
DEFINED = {
    "README.md": ("3.11",),
    "docs/circuits.md": ("4.3",),
    "docs/gallery-circuits.md": ("1.2", "1.3"),
    "docs/gallery-induction.md": ("1.1", "1.2", "1.3"),
    "docs/stability.md": ("1.0", "0.2", "0.4", "3.11", "3.14"),
    "docs/serving.md": ("5.23", "3.1", "0.32", "1.32", "5.7"),
}


def prose_and_rest(page: str) -> tuple[str, str]:
    """Return the sentences of a page, without code and headings, and its tables and code."""
    text = re.sub(r"\]\([^)]*\)", "]", (ROOT / page).read_text(encoding="utf-8"))
    prose, rest, fenced = [], [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        is_code = fenced or line.startswith(("```", "    ", "|", "#"))
        (rest if is_code else prose).append(line)
    return re.sub(r"`[^`]*`", "", "\n".join(prose)), "\n".join(rest)


MEASURED = re.compile(r"(?<![\w.^-])(?:\d+\.\d+(?![\w.])|\d+(?= ?%))")  # decimal numbers, and percentages


def is_rounded_from(said: str, measured: list[float]) -> bool:
    """Test if a number, to the digits it has, is one of those measured."""
    unit = 10.0 ** -len(said.partition(".")[2])
    return any(abs(value - float(said)) <= 0.5001 * unit for value in measured)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md" and "benchmarks" not in page])
def test_a_decimal_number_of_the_prose_is_in_a_table_or_an_example(page: str) -> None:
    prose, rest = prose_and_rest(page)
    measured = [float(number) for number in MEASURED.findall(rest)]
    if page.startswith("docs/study"):  # beside tables in files
        tables = (ROOT / "docs" / "tables").glob("bits-*.csv" if "bits" in page else "ranks-*.csv")
        measured += [float(number) for path in tables for number in MEASURED.findall(path.read_text(encoding="utf-8"))]
    if page == "docs/algorithms.md":
        texts = ["\n".join(prose_and_rest(other)) for other in PAGES if "benchmarks" in other]
        measured += [float(number) for text in texts for number in MEASURED.findall(text)]
    said = [number for number in MEASURED.findall(prose) if number not in DEFINED.get(page, ())]
    assert [number for number in said if not is_rounded_from(number, measured)] == []
