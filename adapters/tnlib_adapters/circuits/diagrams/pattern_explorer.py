"""Attention patterns to explore: HTML in which a head is chosen, and weights are read by pointing at them.

The element holds its data and its script, and loads nothing. Weights are stored in one byte each, to 1/255, and runs of
up to 255 zeros in two: three quarters of the weights of a language model are below 1/510.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._files import write_whole
from tnlib._typing import Array
from tnlib._validate import as_array, as_list, as_target, is_list
from tnlib_adapters.attention.validation import as_index

_SCRIPT = Path(__file__).with_suffix(".js")
_STYLE = """
#ID { font: 14px/1.5 system-ui, sans-serif }
#ID button { font: inherit; border: 1px solid #ccc; border-radius: 3px; background: #fff; color: #222;
  padding: 0 .25rem; cursor: pointer }
#ID .heads { display: inline-block; max-width: 100%; overflow-x: auto }
#ID .heads div { white-space: nowrap; color: #888 }
#ID .heads button { padding: 1px; margin: 1px; line-height: 0; vertical-align: middle }
#ID .heads button[aria-pressed=true] { outline: 2px solid #d2601a }
#ID .heads canvas { width: 40px; height: 40px; image-rendering: pixelated }
#ID .view { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start }
#ID .text { flex: 1 1 18rem }
#ID .pattern { border: 1px solid #ccc; max-width: 100%; image-rendering: pixelated; cursor: crosshair }
#ID .readout { min-height: 3em; margin: .6rem 0 }
#ID .tokens { line-height: 1.9 } #ID .tokens button { margin: 0 .15rem .15rem 0; white-space: pre }
#ID .tokens .chosen { outline: 2px solid #d2601a }
"""


@dataclass(frozen=True, eq=False, repr=False)
class PatternExplorer:
    """Attention patterns of a sequence as interactive HTML, returned by `explore_patterns`; a notebook shows it.

    Parameters
    ----------
    html
        An element with its style and script, which needs no network.
    n_heads
        Number of heads of every layer.
    n_positions
        Length of the sequence.

    Examples
    --------
    >>> import numpy as np
    >>> uniform = np.tril(np.ones((3, 3))) / np.arange(1, 4)[:, None]
    >>> found = explore_patterns([np.stack([uniform, np.eye(3)])], ["a", "b", "c"])
    >>> found.n_heads, found.n_positions, "<script>" in found.html
    ((2,), 3, True)
    """

    html: str
    n_heads: tuple[int, ...]
    n_positions: int

    def __repr__(self) -> str:
        return f"PatternExplorer({len(self.n_heads)} layers, {sum(self.n_heads)} heads, {self.n_positions} positions)"

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page of its own, atomically; an existing file is replaced."""
        head = '<meta charset="utf-8"><title>Attention patterns</title>'
        page = f'<!doctype html><html lang="en"><head>{head}</head><body>\n{self.html}\n</body></html>\n'
        write_whole(as_target("PatternExplorer.save", path), page.encode())


def explore_patterns(
    patterns: Sequence[Array], names: Sequence[str], *, head: tuple[int, int] = (0, 0)
) -> PatternExplorer:
    """Return the attention patterns of a sequence as HTML, with a choice of the head and weights by pointing.

    Parameters
    ----------
    patterns
        Per layer (heads, n, n), weights from 0 to 1, queries as rows. A weight takes at most 4/3 bytes of the page.
    names
        The n tokens, as they are to be shown.
    head
        The layer and head that are shown first.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If shapes do not agree, weights lie outside of 0 to 1, names are not strings, or there is no such head.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> patterns = [of_layer[0] for of_layer in run(model, [5, 6, 7, 5, 6]).patterns]
    >>> explore_patterns(patterns, ["5", "6", "7", "5", "6"])
    PatternExplorer(2 layers, 8 heads, 5 positions)
    """
    layers = as_list("explore_patterns", "patterns", patterns, "arrays")
    names = as_list("explore_patterns", "names", names, "strings")
    if wrong := {type(name).__name__ for name in names if not isinstance(name, str)}:
        raise ArgumentTypeError(
            f"explore_patterns: names must be strings, one for every token, got {', '.join(sorted(wrong))}; pass for "
            "example tokenizer.convert_ids_to_tokens(tokens)."
        )
    n = len(names)
    checked = [as_array("explore_patterns", f"patterns[{k}]", layer, ndim=3) for k, layer in enumerate(layers)]
    for k, layer in enumerate(checked):
        _check(k, layer, n)
    if not is_list(head) or len(head) != 2:
        raise ArgumentTypeError(
            f"explore_patterns: head must be (layer, head), got {head!r:.80}; pass for example (0, 3)."
        )
    chosen = as_index("explore_patterns", "layer of head", head[0], len(checked))
    first = as_index("explore_patterns", "head", head[1], len(checked[chosen]))
    data = {
        "n": n,
        "names": list(names),
        "first": [chosen, first],
        "layers": [[_encoded(head) for head in layer] for layer in checked],
    }
    return PatternExplorer(_element(data), tuple(len(layer) for layer in checked), n)


def _check(k: int, layer: Array, n: int) -> None:
    if layer.shape[1:] != (n, n) or layer.dtype.kind == "c":
        raise ArgumentError(
            f"explore_patterns: patterns[{k}] must be real of shape (heads, {n}, {n}) for {n} names, got {layer.dtype} "
            f"of shape {layer.shape}; pass those of one sequence."
        )
    if layer.min() < -1e-3 or layer.max() > 1 + 1e-3:
        raise ArgumentError(
            f"explore_patterns: patterns[{k}] must lie between 0 and 1, got {layer.min():.3g} to {layer.max():.3g}; "
            "pass weights after softmax."
        )


def _encoded(pattern: Array) -> str:
    """Return weights (n, n) from 0 to 1 as bytes from 0 to 255, in base64; a byte 0 is followed by a count of zeros."""
    levels = np.rint(255 * np.clip(pattern, 0, 1)).astype(np.uint8).tobytes()
    packed = re.sub(rb"\0{1,255}", lambda run: bytes([0, len(run[0])]), levels)
    return base64.b64encode(packed).decode("ascii")


def _element(data: dict[str, object]) -> str:
    """Return the element; its id is a digest of its data, so that pages with several of them are reproducible."""
    text = json.dumps(data)
    for letter in "<>&":  # no token ends the script
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    name = f"patterns-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    script = _SCRIPT.read_text(encoding="utf-8").rstrip()
    side = "".join(
        f'<option value="{value}">{html.escape(label)}</option>'
        for value, label in (("query", "what a token attends to"), ("key", "what attends to a token"))
    )
    return (
        f'<div id="{name}"><style>{_STYLE.replace("#ID", "#" + name)}</style>\n'
        '<p>Layers as rows, heads as columns; choose one.</p><div class="heads"></div>\n'
        f'<p><b class="title"></b> <select class="side" aria-label="tokens show">{side}</select></p>\n'
        '<div class="view"><canvas class="pattern"></canvas><div class="text"><div class="tokens"></div>'
        '<p class="readout" aria-live="polite"></p></div></div>\n'
        "<noscript>The patterns are drawn by a script.</noscript>\n"
        f"<script>{{ const data = {text};\n"
        f"document.querySelectorAll('[id=\"{name}\"]').forEach((root) => {script}(root, data)); }}</script></div>"
    )
