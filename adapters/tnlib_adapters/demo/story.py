"""The demonstration in sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tnlib_adapters.demo.run_demo import KEEP, Demo
from tnlib_adapters.demo.size_and_loss import SizeAndLoss
from tnlib_adapters.files.folder import path_text

_MODEL = (
    "The model: two attention layers of four heads, 55,936 parameters, trained to continue a sequence of random tokens "
    "that occurs for the second time. It is part of the package; in tnlib compress its name is builtin."
)
_NEXT = """\
Next: pip install 'tnlib[torch]'
      tnlib compress IN OUT --calibrate TEXT
rounds the weights of your model, with fewer bits for weights that change its output less.\
"""
_WIDTH = 100
_MOST_FINDINGS = 4


def story(demo: Demo) -> list[str]:
    """Return the paragraphs: the model, the compression, its cost beside rounding, the heads, what to open."""
    before, after = demo.original, demo.written
    return [
        _filled(_MODEL),
        _filled(
            f"The compression: only the attention is compressed, {_kb(before)} -> {_kb(after)}, "
            f"{before.n_bytes / after.n_bytes:.1f} times smaller. {100 * KEEP:.0f} % of its parameters are kept, as "
            "low-rank factors of the QK and OV operators, rounded to 4 bits. Multiplications per token in its weights: "
            f"{before.multiplications:,} -> {after.multiplications:,}, "
            f"{before.multiplications / after.multiplications:.1f} times fewer."
        ),
        _table(demo),
        _filled(f"Conclusion: {verdict(after, demo.rounded)}"),
        "\n".join(["Inside the model:", *(_filled(text, "  - ") for text, _ in demo.findings[:_MOST_FINDINGS])]),
        _files(demo),
        _NEXT,
    ]


def verdict(written: SizeAndLoss, rounded: Sequence[SizeAndLoss]) -> str:
    """Return how a compression compares with rounding: at no fewer bytes, and at the next smaller loss."""
    larger = [point for point in rounded if point.n_bytes >= written.n_bytes]
    nearer = min((point for point in rounded if point.loss < written.loss), key=lambda p: p.n_bytes, default=None)
    beside = min(larger, key=lambda point: point.n_bytes, default=None)
    sentences = []
    if beside is not None and beside.loss > written.loss:
        sentences.append(
            f"At {_kb(written)}, low rank has a lower loss than the same model {beside.label} at {_kb(beside)}."
        )
    if nearer is not None:
        sentences.append(
            f"With more bytes rounding has the lower loss: {nearer.loss:.3f} {nearer.label}, at "
            f"{nearer.n_bytes / written.n_bytes:.1f} times the bytes."
            if nearer.n_bytes > written.n_bytes
            else f"Rounding is better here: {nearer.loss:.3f} {nearer.label}, at {_kb(nearer)}."
        )
    return " ".join(sentences)


def _filled(text: str, start: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _table(demo: Demo) -> str:
    points = sorted((demo.original, demo.written, *demo.rounded), key=lambda point: -point.n_bytes)
    width = max(len(point.label) for point in points)
    lines = [
        f"  {point.label:<{width}}  {_kb(point):>8}  {point.bits:4.1f} bits per number  loss {point.loss:.3f}"
        for point in points
    ]
    head = f"Cost: loss on held-out sequences, in nats per token; chance is {demo.chance:.3f}."
    return "\n".join([head, *lines])


def _files(demo: Demo) -> str:
    first, *others = (path_text(file) for file in demo.files)
    return f"Open first: {first} (loss against size)\nThen:       " + "\n            ".join(others)


def _kb(point: SizeAndLoss) -> str:
    return f"{point.n_bytes / 1e3:.1f} kB"
