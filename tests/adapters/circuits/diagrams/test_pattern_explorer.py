"""Attention patterns to explore as a page."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_pages import check_page
from hypothesis import given
from hypothesis import strategies as st
from oracles import refused
from tnlib_adapters.circuits import explore_patterns

NASTY = ["</script><script>alert(1)</script>", "<!--", "&amp;", "'\"`${1}", "\u2028", "\N{CJK UNIFIED IDEOGRAPH-4E00}"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def patterns(layers: int, heads: int, n: int, seed: int = 0) -> list[np.ndarray]:
    x = np.random.default_rng(seed).random((layers, heads, n, n)) * np.tri(n)
    return list(x / x.sum(-1, keepdims=True))


def data(html: str) -> Any:
    """The data of the script."""
    (found,) = re.findall(r"<script>\{ const data = (\{.*\});\n", html)
    return json.loads(found)


def decoded(text: str, n: int) -> np.ndarray:
    """The weights of a head: a byte 0 is followed by a number of zeros."""
    stored, levels = iter(base64.b64decode(text)), list[int]()
    for byte in stored:
        levels += [byte] if byte else [0] * next(stored)
    return np.array(levels).reshape(n, n) / 255


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 5, 24]), st.integers(0, 99))
def test_the_element_holds_every_weight(layers: int, heads: int, n: int, seed: int) -> None:
    of_layers, names = patterns(layers, heads, n, seed), [f"t{k}" for k in range(n)]
    found = data(explore_patterns(of_layers, names).html)
    assert found["names"] == names
    for stored, layer in zip(found["layers"], of_layers, strict=True):
        weights = [decoded(head, n) for head in stored]
        assert np.abs(np.array(weights) - layer).max() <= 0.5001 / 255


def test_a_head_is_shown_first_and_zeros_take_little_space() -> None:
    of_layers = patterns(2, 3, 40)
    assert data(explore_patterns(of_layers, ["a"] * 40).html)["first"] == [0, 0]
    found = data(explore_patterns(of_layers, ["a"] * 40, head=(1, -1)).html)
    assert found["first"] == [1, 2]
    assert (
        max(len(head) for layer in found["layers"] for head in layer) < 0.8 * 4 / 3 * 40**2
    )  # half are above the diagonal


def test_no_token_ends_the_script(tmp_path: Path) -> None:
    found = explore_patterns(patterns(1, 2, len(NASTY)), NASTY)
    assert data(found.html)["names"] == NASTY
    found.save(tmp_path / "page.html")
    check_page((tmp_path / "page.html").read_text(encoding="utf-8"), scripts=1)
    assert found._repr_html_() == found.html
    assert repr(found) == "PatternExplorer(1 layers, 2 heads, 6 positions)"


def test_the_same_patterns_give_the_same_element_and_others_another_id() -> None:
    a, again, b = (explore_patterns(patterns(1, 1, 3, seed), ["a", "b", "c"]).html for seed in (0, 0, 1))
    assert a == again
    assert re.findall(r'id="([^"]+)"', a) != re.findall(r'id="([^"]+)"', b)


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    of_layers = patterns(2, 2, 3)
    with refused(ValueError, "explore_patterns: patterns[0] must be real of shape (heads, 2, 2) for 2 names"):
        explore_patterns(of_layers, ["a", "b"])
    with refused(ValueError, "explore_patterns: patterns[1] must lie between 0 and 1"):
        explore_patterns([of_layers[0], of_layers[1] - 0.5], ["a", "b", "c"])
    with refused(ValueError, "explore_patterns: patterns[0] must have 3 legs"):
        explore_patterns([of_layers[0][0]], ["a", "b", "c"])
    with refused(ValueError, "explore_patterns: layer of head must"):
        explore_patterns(of_layers, ["a", "b", "c"], head=(2, 0))
    with refused(TypeError, "explore_patterns: head must be (layer, head), got 3"):
        explore_patterns(of_layers, ["a", "b", "c"], head=3)  # type: ignore[arg-type]
    with refused(TypeError, "explore_patterns: names must be strings", "got int"):
        explore_patterns(of_layers, [1, 2, 3])  # type: ignore[list-item]
    with refused(TypeError, "explore_patterns: names must be a non-empty sequence of strings, got NoneType"):
        explore_patterns(of_layers, None)  # type: ignore[arg-type]
    with refused(TypeError, "explore_patterns: names must be a non-empty sequence of strings, got str"):
        explore_patterns(of_layers, "abc")
    with refused(FileNotFoundError, "PatternExplorer.save"):
        explore_patterns(of_layers, ["a", "b", "c"]).save(tmp_path / "none" / "page.html")


def dom_after_scripts(page: Path) -> str:
    """The page as a browser has it after its scripts ran."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


ACTIONS = """
const root = document.querySelector("[id^=patterns]"), say = (text) => document.body.append("|" + text);
const seen = () => say(root.querySelector(".title").textContent + ": " + root.querySelector(".readout").textContent);
const [first, second, third] = root.querySelectorAll(".tokens button");
root.querySelectorAll(".heads button")[3].click(); seen();
third.dispatchEvent(new MouseEvent("mouseenter")); seen();
third.dispatchEvent(new MouseEvent("mouseleave"));
const side = root.querySelector(".side"); side.value = "key"; side.dispatchEvent(new Event("change"));
first.click(); second.dispatchEvent(new MouseEvent("mouseenter")); seen();
first.click();
const canvas = root.querySelector(".pattern"), box = canvas.getBoundingClientRect();
const at = {clientX: box.left + box.width / 2, clientY: box.top + box.height * 0.9};
canvas.dispatchEvent(new MouseEvent("mousemove", at)); seen();
const size = canvas.width / 3, colour = (i, j) =>
  canvas.getContext("2d").getImageData((j + 0.5) * size, (i + 0.5) * size, 1, 1).data.slice(0, 3).join(" ");
say([colour(0, 0), colour(0, 1), colour(2, 0)].join(", "));
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_shows_what_is_pointed_at(tmp_path: Path) -> None:
    of_layers = [np.zeros((2, 3, 3)), np.zeros((2, 3, 3))]
    of_layers[1][1] = [[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.3, 0.2]]
    page = tmp_path / "page.html"
    explore_patterns(of_layers, ["the", "<b>", "sat"]).save(page)
    page.write_text(page.read_text().replace("</body>", f"<script>{ACTIONS}</script></body>"))
    dom = dom_after_scripts(page)
    said = dom.replace("&lt;", "<").replace("&gt;", ">").rpartition("</script>")[2].partition("</body>")[0].split("|")
    assert [line.strip() for line in said[1:]] == [
        "Head 1.1: Point at the pattern or at a token; click to keep it.",
        "Head 1.1: sat (2) attends to the (0) 50 %, <b> (1) 30 %, sat (2) 20 %",
        "Head 1.1: the (0) is attended to by the (0) 100 %, sat (2) 50 %, <b> (1) 25 %",
        "Head 1.1: sat (2) attends to <b> (1): 30 %",
        "8 48 107, 255 255 255, 131 151 181",  # weights 1, 0 and 128 / 255
    ]
    assert dom.count('aria-pressed="true"') == 1


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_every_copy_of_an_element_is_filled_once(tmp_path: Path) -> None:
    page, element = tmp_path / "page.html", explore_patterns(patterns(2, 2, 3), ["a", "b", "c"]).html
    saved = element.replace('<div class="tokens">', '<div class="tokens"><button>of a saved page</button>')
    page.write_text(f"<!doctype html><body>{element}{saved}{element}</body>")
    dom = dom_after_scripts(page)
    assert dom.count('aria-pressed="true"') == 3
    assert dom.count('title="position 2"') == 3
    assert dom.count('aria-label="head 1.1"') == 3
    assert "of a saved page" not in dom
