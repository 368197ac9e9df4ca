"""Sphinx configuration: `make docs` runs gallery and tutorials, and builds the pages into out/docs."""

import contextlib
import doctest
import os
import re
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
html_static_path = ["static"]
html_css_files = ["tnlib.css"]
html_math_renderer = "mathml"
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


# What users search for, by the page that the search names first: titles and frequent words decide the other cases.
SEARCHED = {
    "algorithms": ("quantics", "QTT"),
    "architectures": ("supported models",),
    "circuits-discovery": ("activation patching", "path patching"),
    "circuits-heads": ("composition scores",),
    "compress": ("compress a model", "compression"),
    "compression-methods": ("low rank", "quantization"),
    "compression-resources": ("GPU", "CUDA", "device", "resume"),
    "conventions": ("random seed", "rtol", "max_rank"),
    "frozen": ("rotary embeddings",),
    "how-to/decompose-zarr-on-a-cluster": ("zarr", "cluster", "dask"),
    "how-to/read-an-itensor-file": ("ITensor",),
    "how-to/serve-with-llama-cpp": ("llama.cpp",),
    "index": ("install", "installation"),
    "physics": ("entanglement entropy", "matrix product state", "MPS", "DMRG", "quimb", "TeNPy"),
    "serving": ("vllm", "sglang", "onnxruntime", "GPTQ"),
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
    """Enter the words of `SEARCHED` into the index of a page, below its title."""
    if words := SEARCHED.get(page):
        title, _, text = source[0].partition("\n")
        source[0] = f"{title}\n\n```{{index}} {', '.join(f'! {word}' for word in words)}\n```\n{text}"


def language_of(code: str) -> str:
    """Return the language of an indented block by its first word."""
    first = code.split(maxsplit=1)[0]
    commands, statements = ("$", "tnlib", "pip", "make", "python"), ("import", "from", "if", "model", ">>>")
    return "bash" if first in commands else "python" if first in statements else "text"


def prepare_code(app: Sphinx, doctree: nodes.document) -> None:
    """Remove the empty line at the end of every example, which doctest needs, and mark short names for the style."""
    for block in doctree.findall(nodes.literal_block):
        block[0] = nodes.Text(block.astext().rstrip())
        block.rawsource = block.astext()  # a block whose text differs from its source is not highlighted
        if "language" not in block:
            block["language"] = language_of(block.astext())
    for name in doctree.findall(nodes.literal):
        if len(name.astext()) <= 24:
            name["classes"].append("short")


def break_titles(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document) -> None:
    """Let the titles of the reference, dotted names, break after dots and underscores on narrow screens."""
    if page.startswith("reference/"):
        title = re.compile("(?<=<h1>)[^<]+")
        context["body"] = title.sub(lambda name: re.sub(r"(?<=[._])(?=\w)", "<wbr>", name[0]), context["body"], count=1)


def setup(app: Sphinx) -> None:
    """Run the gallery before the pages are read, index and prepare these, and break titles."""
    app.connect("builder-inited", run_gallery)
    app.connect("source-read", index_searches)
    app.connect("doctree-read", prepare_code)
    app.connect("html-page-context", break_titles)
