"""Sphinx configuration: `make docs` runs gallery and tutorials, and builds the pages into out/docs."""

import contextlib
import doctest
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "tnlib"
release = metadata.version("tnlib")
html_title = f"tnlib {release}"
author = "The tnlib developers"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "figures",
    "mathml",
]
html_theme = "furo"
html_use_index = False  # the search finds names, and the pages of functions list them by topic
html_static_path = ["static"]
html_css_files = ["tnlib.css"]
html_math_renderer = "mathml"
html_search_scorer = str(Path(__file__).parent / "extensions" / "search_scorer.js")
exclude_patterns = ["extensions", "pictures", "static", "templates"]
templates_path = ["templates"]  # of the pages in docs/reference, one for every public name
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = False
napoleon_attr_annotations = False
napoleon_use_param = False  # "rtol, max_rank" is one entry
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# of a model that is not everywhere: with the outputs that they hold, which a slow test runs again
nb_execution_excludepatterns = ["tutorials/*-of-a-language-model.ipynb"]
nb_merge_streams = True
# tqdm warns in a notebook without ipywidgets, which the pages do not need
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # the gallery is linked by its notions


# What users search for, by the page that the search names first; `search_scorer.js` compares words, not their order.
SEARCHED = {
    "algorithms": ("quantics", "QTT"),
    "architectures": ("supported models", "architecture", "rotary embeddings"),
    "benchmarks": ("benchmark", "faster", "speed"),
    "choose": ("which", "missing entries"),
    "circuits": ("induction heads",),
    "circuits-attribution": ("activation patching",),
    "circuits-discovery": ("attribution patching", "find circuit"),
    "circuits-heads": ("composition scores", "heads copy"),
    "compress": ("compress a model", "compression", "reduce size", "sentence embeddings"),
    "compressed-folder": ("load compressed", "fine-tune compressed", "train compressed"),
    "compression-methods": ("low rank", "quantization"),
    "compression-resources": ("GPU", "CUDA", "device", "resume", "how long", "time compression", "memory"),
    "conventions": ("rtol", "max_rank", "tolerance", "truncation error", "error bound"),
    "faq": ("cite", "slow"),
    "gauges": ("canonical form",),
    "glossary": ("what is", "meaning"),
    "how-to/choose-rank-and-bits": ("choose rank", "how many bits"),
    "how-to/decompose-zarr-on-a-cluster": ("zarr", "cluster", "dask"),
    "how-to/read-an-itensor-file": ("ITensor file",),
    "how-to/serve-with-llama-cpp": ("llama.cpp",),
    "index": ("install", "installation"),
    "inspect": ("attention patterns", "inspect"),
    "physics": ("entanglement entropy", "matrix product state", "MPS", "DMRG", "quimb", "TeNPy", "ITensor"),
    "reference/tnlib.cp": ("CP decomposition", "canonical polyadic"),
    "reference/tnlib.svd": ("singular value decomposition",),
    "reference/tnlib.tt_cross": ("TT-cross", "cross interpolation"),
    "reference/tnlib.tt_svd": ("TT-SVD", "tensor train"),
    "reference/tnlib.tucker": ("Tucker decomposition", "HOSVD"),
    "scale": ("larger than memory",),
    "serving": ("vllm", "sglang", "onnxruntime", "GPTQ", "GGUF"),
    "study": ("perplexity",),
    "troubleshooting": ("out of memory", "error message"),
}


def run_gallery(app: Sphinx) -> None:
    """Run the code of every page of the gallery in the folder of its pictures; a number that is not so is a warning."""
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for page in sorted(Path(app.srcdir).glob("gallery-*.md")):
        with contextlib.chdir(Path(app.srcdir) / "pictures"):
            result = doctest.testfile(str(page), module_relative=False, optionflags=options)
        if result.failed:
            logging.getLogger(__name__).warning("%s: %d of %d examples fail", page.name, *result)


def index_searches(app: Sphinx, page: str, source: list[str]) -> None:
    """Enter the words of `SEARCHED` into the index of a page, above its title."""
    if words := SEARCHED.get(page):
        entries = ", ".join(f"! {word}" for word in words)
        is_markdown = source[0].startswith("#")
        source[0] = (f"```{{index}} {entries}\n```\n\n" if is_markdown else f".. index:: {entries}\n\n") + source[0]


def search_questions(app: Sphinx, exception: Exception | None) -> None:
    """Search the site for questions of users; another page than the expected ones is a warning."""
    script = Path(app.confdir) / "extensions" / "search_questions.js"
    if exception is None and (node := shutil.which("node")):
        arguments = (node, script, app.outdir, script.with_suffix(".tsv"))
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)
        for line in (result.stdout + result.stderr).splitlines():
            logging.getLogger(__name__).warning("search: %s", line)


def language_of(code: str) -> str:
    """Return the language of an indented block by its beginning: a command, or a statement of Python."""
    if re.match(r"\$|[A-Z_]+=|(tnlib|pip|make|python|git|llama-cli) ", code):
        return "bash"
    return "python" if re.match(r">>>|(import|from|if|for) |[\w.]+\(|[\w(, )]+ = ", code) else "text"


def prepare_code(app: Sphinx, doctree: nodes.document) -> None:
    """Remove the empty line at the end of every example, which doctest needs, and mark short names for the style."""
    for block in doctree.findall(nodes.literal_block):
        block[0] = nodes.Text(block.astext().rstrip())
        block.rawsource = block.astext()  # a block whose text differs from its source is not highlighted
        if block.get("language", "none") == "none":  # of indented blocks
            block["language"] = language_of(block.astext())
    for name in doctree.findall(nodes.literal):
        if len(name.astext()) <= 24:
            name["classes"].append("short")


def break_titles(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document) -> None:
    """Let the titles of the reference, dotted names, break after dots and underscores on narrow screens."""
    if page.startswith("reference/"):
        title = re.compile("(?<=<h1>)[^<]+")
        context["body"] = title.sub(lambda name: re.sub(r"(?<=[._])(?=\w)", "<wbr>", name[0]), context["body"], count=1)


def returned_by() -> dict[str, list[str]]:
    """Return the public functions and methods that return a class, by the name of the class."""
    lists = "".join(page.read_text(encoding="utf-8") for page in Path(__file__).parent.glob("api*.md"))
    sources: dict[str, list[str]] = {}
    for name in re.findall(r"^   (tnlib\S*)$", lists, re.MULTILINE):
        value = pkgutil.resolve_name(name)
        methods = vars(value).items() if isinstance(value, type) else ()
        functions = {name: value, **{f"{name}.{key}": method for key, method in methods if key[0] != "_"}}
        for function, called in functions.items():
            for word in re.findall(r"\w+", str(getattr(called, "__annotations__", {}).get("return", ""))):
                sources.setdefault(word, []).append(function)
    return sources


def name_sources(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Name below a class without example the functions that return it, which have examples."""
    if what == "class" and not any(">>>" in line for line in lines) and (names := SOURCES.get(value.__name__)):
        links = ", ".join(f":py:obj:`{source}`" for source in names[:4])
        lines += ["", f"Returned by {links}."]


def keep_initials(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escape the first initial of an author at the beginning of a line, which would be the number of a list."""
    lines[:] = [re.sub(r"^(\s*)(?=[A-Z]\. )", r"\1\\", line) for line in lines]


SOURCES = returned_by()


def setup(app: Sphinx) -> None:
    """Run the gallery before the pages are read, index and prepare these and docstrings, and search the site."""
    app.connect("builder-inited", run_gallery)
    app.connect("source-read", index_searches)
    app.connect("doctree-read", prepare_code)
    app.connect("html-page-context", break_titles)
    app.connect("autodoc-process-docstring", name_sources)
    app.connect("autodoc-process-docstring", keep_initials)
    app.connect("build-finished", search_questions)
