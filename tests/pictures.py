"""Pictures that were drawn before, beside those that are drawn now."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_POINTS, _GREY = 0.1, 0.2  # what a coordinate and a pixel may differ by: rounding elsewhere
# What is not part of the picture: which version drew it, and names of clip paths, which are hashes of coordinates.
_APART = re.compile(r"<metadata>.*?</metadata>|\bp[0-9a-f]{10}\b", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def differ(one: Path, other: Path) -> str:
    """Return how two pictures differ, an empty string where no line moves and no grey changes."""
    if one.read_bytes() == other.read_bytes():
        return ""
    return _drawings_differ(one, other) if one.suffix == ".svg" else _images_differ(one, other)


def _drawings_differ(one: Path, other: Path) -> str:
    texts = [_APART.sub("", path.read_text(encoding="utf-8")) for path in (one, other)]
    words = [_NUMBER.sub("0", text).split("\n") for text in texts]
    for mine, theirs in zip(*words, strict=False):
        if mine != theirs:
            return f"{mine.strip()} instead of {theirs.strip()}"
    if len(words[0]) != len(words[1]):
        return f"{len(words[0])} lines instead of {len(words[1])}"
    mine, theirs = (np.array([float(number) for number in _NUMBER.findall(text)]) for text in texts)
    off = float(np.abs(mine - theirs).max(initial=0.0))
    return f"{off:.2g} points apart" if off > _POINTS else ""


def _images_differ(one: Path, other: Path) -> str:
    from matplotlib.image import imread

    mine, theirs = imread(one), imread(other)
    if mine.shape != theirs.shape:
        return f"shape {mine.shape} instead of {theirs.shape}"
    off = float(np.abs(mine - theirs).max())
    return f"{off:.2g} of white apart" if off > _GREY else ""
