"""Pages of HTML taken apart, and what must hold of any; pictures that were drawn before, beside those drawn now."""

from __future__ import annotations

import html.parser
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np

VOID = {"meta", "br", "hr", "img", "link", "input"}
SVG = "{http://www.w3.org/2000/svg}"


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the text outside pictures; refuses tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"svg", "style", "script"} & set(self.open):
            self.text += data


def pictures(page: str) -> list[ET.Element]:
    """The pictures of a page as XML, which they must be."""
    return [ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def check_page(page: str, *, scripts: int = 0) -> Page:
    """Hold a page against what is asked of all: closed tags, unique ids, nothing from elsewhere, full pictures.

    It has this many scripts of its own.
    """
    assert page.startswith("<!doctype html>")
    found = Page(page)
    names = {tag for tag, _ in found.tags}
    assert [tag for tag, _ in found.tags].count("script") == scripts
    assert not {"link", "iframe", "object", "embed", "video", "base"} & names
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in found.tags:
        for key in ("src", "href", "xlink:href", "data", "action"):
            value = attributes.get(key)
            assert value is None or value.startswith(("#", "data:")), f"{tag} refers to {value}"
            assert value is None or value.startswith("data:") or value[1:] in ids, f"{tag} refers to no id, {value}"
    for url in re.findall(r"url\(([^)]*)\)", page):
        assert url.strip("'\"#") in ids
    assert "@import" not in page
    for picture in pictures(page):
        assert float(picture.attrib["width"].removesuffix("pt")) > 50
        drawn = [one for one in picture.iter() if one.tag in (f"{SVG}path", f"{SVG}image", f"{SVG}use")]
        assert len(drawn) > 5
    return found


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
