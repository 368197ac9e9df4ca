"""What notebooks show: well-formed fragments with the numbers of the repr, and images that decode."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import oracles
import pytest
from oracles import ALL_FORMATS, format_id

import tnlib
from tnlib._html import facts, heat_image, table


def parsed(html: str) -> ET.Element:
    return ET.fromstring(re.sub(r"(<img[^>]*)>", r"\1/>", html))


@pytest.mark.parametrize("value", ALL_FORMATS, ids=format_id)
def test_every_format_shows_itself(value: tnlib.Format) -> None:
    html = value._repr_html_()
    parsed(html)
    assert type(value).__name__ in html
    assert f"{value.n_parameters:,}" in html


def test_a_fit_shows_its_report() -> None:
    fit = tnlib.tt_svd(oracles.normal((4, 5, 6)), rtol=0.3)
    html = fit._repr_html_()
    parsed(html)
    assert f"{fit.error:.3g}, certified" in html
    capped, _ = oracles.quietly(lambda: tnlib.tt_svd(oracles.ghz(4), max_rank=1))
    assert "separates equal singular values" in capped._repr_html_()


def test_a_long_train_has_a_short_picture() -> None:
    html = tnlib.ones((2,) * 1000)._repr_html_()
    parsed(html)
    assert len(html) < 10_000
    assert html.count("<rect") <= 64


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 5)])
def test_images_decode_to_the_values(shape: tuple[int, int]) -> None:
    image = pytest.importorskip("matplotlib.image")
    values = oracles.normal(shape, seed=1)
    html = heat_image(values, 'a "label" <b>', width=100)
    parsed(html)
    (data,) = re.findall(r"base64,([^\"]+)", html)
    pixels = image.imread(io.BytesIO(base64.b64decode(data)), format="png")[..., :3]
    assert pixels.shape == (*shape, 3)
    clear = np.abs(values) > 0.01 * np.abs(values).max()
    assert np.array_equal((pixels[..., 2] > pixels[..., 0])[clear], (values > 0)[clear])
    at = np.unravel_index(np.abs(values).argmax(), shape)
    assert np.allclose(255 * pixels[at], (8, 48, 107) if values[at] > 0 else (166, 54, 3))


def test_names_are_escaped_and_zeros_drawn() -> None:
    evil = '</title><script>"&'
    for html in (facts(evil, {evil: evil}), table([evil], [[evil]]), heat_image(np.zeros((2, 2)), evil, width=10)):
        parsed(html)
        assert "<script>" not in html
