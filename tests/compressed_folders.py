"""What a compressed folder holds, read from its bytes alone, and compressions without their slow parts."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tnlib_adapters.cli_options import arguments_of
from tnlib_adapters.compression.source_model import Limits

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U8": "u1", "I8": "i1", "BOOL": "?"}
ATTENTION = {
    "bert": r"(bert\.)?encoder\.layer\.(\d+)\.attention\.((self\.(query|key|value)|output\.dense)\.|tnlib\.)",
    "gpt2": r"(transformer\.)?h\.(\d+)\.attn\.(c_attn\.|c_proj\.|tnlib\.)",
    "tnlib_attention_only": r"()layers\.(\d+)\.attention\.",
}
MODULES = {
    "bert": ("self.query", "self.key", "self.value", "output.dense"),
    "tnlib_attention_only": ("query", "key", "value", "output"),
}


@dataclass(frozen=True)
class Stored:
    file: str
    dtype: str
    values: np.ndarray  # float64 where the file holds floats


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def read_index(folder: Path) -> dict[str, Any] | None:
    index = folder / "model.safetensors.index.json"
    return json.loads(index.read_text()) if index.exists() else None


def read_file(file: Path) -> dict[str, Stored]:
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        values = np.frombuffer(raw[begin:end], NUMPY[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            values = (values.astype("<u4") << 16).view("<f4")
        wide = values.astype(np.float64) if values.dtype.kind == "f" else values
        found[name] = Stored(file.name, entry["dtype"], wide)
    return found


def read_tensors(folder: Path) -> dict[str, Stored]:
    index = read_index(folder)
    files = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    return {name: stored for file in files for name, stored in read_file(folder / file).items()}


def metadata(file: Path) -> dict[str, str]:
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).get("__metadata__", {})


def attention_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors that compression replaces, and whatever stands in their place."""
    pattern = re.compile(ATTENTION[read_config(folder)["model_type"]])
    return {name: stored for name, stored in read_tensors(folder).items() if pattern.match(name)}


def n_attention(folder: Path) -> int:
    return sum(stored.values.size for stored in attention_tensors(folder).values())


def digest(folder: Path) -> dict[str, str]:
    """Relative path -> what lies there, so that two digests are equal where nothing was touched."""
    return {str(path.relative_to(folder)): _content(path) for path in sorted(folder.rglob("*"))}


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Dense:
    """One layer: weights (d_model, d_model) that act on rows, biases (d_model,), keyed by "q", "k", "v", "o"."""

    weights: dict[str, np.ndarray]
    biases: dict[str, np.ndarray]
    n_heads: int

    def per_head(self, name: str, head: int) -> np.ndarray:
        """One head's columns with the bias as a last row, (d_model + 1, d_head); rows of "o", (d_head, d_model)."""
        d = len(self.weights[name])
        own = slice(head * d // self.n_heads, (head + 1) * d // self.n_heads)
        if name == "o":
            return self.weights["o"][own]
        bias = self.biases.get(name, np.zeros(d))
        return np.concatenate([self.weights[name], bias[None]])[:, own]

    def operators(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Every head's QK (d_model + 1, d_model + 1) and OV (d_model + 1, d_model), multiplied out."""
        heads = range(self.n_heads)
        qk = [self.per_head("q", h) @ self.per_head("k", h).T for h in heads]
        return qk, [self.per_head("v", h) @ self.per_head("o", h) for h in heads]

    def stack(self) -> np.ndarray:
        """(projection, head, d_model, d_head), the last one transposed."""
        split = [np.stack(np.split(self.weights[name], self.n_heads, axis=1)) for name in "qkv"]
        return np.stack([*split, np.stack(np.split(self.weights["o"].T, self.n_heads, axis=1))])


def dense_layers(folder: Path) -> list[Dense]:
    """The attention of every layer of a folder with tensors under their usual names."""
    config, tensors = read_config(folder), {name: s.values for name, s in attention_tensors(folder).items()}
    kind = config["model_type"]
    n_heads = config["n_head" if kind == "gpt2" else "num_attention_heads"]
    n_layers = config["n_layer" if kind == "gpt2" else "num_hidden_layers"]
    layers = []
    for layer in range(n_layers):
        mine = {
            name[match.end(2) :].split(".", 2)[2]: values
            for name, values in tensors.items()
            if (match := re.match(ATTENTION[kind], name)) and int(match[2]) == layer
        }
        layers.append(_layer(kind, mine, n_heads))
    return layers


def _layer(kind: str, tensors: dict[str, np.ndarray], n_heads: int) -> Dense:
    if kind == "gpt2":
        weights = [*np.split(tensors["c_attn.weight"], 3, axis=1), tensors["c_proj.weight"]]
        biases = [*np.split(tensors["c_attn.bias"], 3), tensors["c_proj.bias"]]
    else:
        weights = [tensors[f"{module}.weight"].T for module in MODULES[kind]]
        biases = [tensors[f"{module}.bias"] for module in MODULES[kind]]
    return Dense(dict(zip("qkvo", weights, strict=True)), dict(zip("qkvo", biases, strict=True)), n_heads)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """norm(a - b) / norm(a)"""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def tail(s: np.ndarray, rank: int) -> float:
    """The relative error that no matrix of this rank goes below, for singular values `s`."""
    return math.sqrt(float(np.sum(s[rank:] ** 2)) / float(np.sum(s**2)))


PAGE = "tnlib_adapters.compression.report_page.write_page"


def leave_out_pictures(patch: pytest.MonkeyPatch) -> None:
    """Write a page without pictures, whose drawing takes most of the time of a small compression."""
    patch.setattr(PAGE, lambda report, file: file.write_text("page", encoding="utf-8"))


def few_steps(patch: pytest.MonkeyPatch, n: int) -> None:
    """Fit every block, or a rounded language model as a whole, on `n` batches."""
    steps = {"STEPS": n, "ROUNDED_STEPS": n, "PASSES": {"low": 0, "default": n, "high": n}}
    for name, value in steps.items():
        patch.setattr(f"tnlib_adapters.compression.calibration.factorise_and_fit.{name}", value)


def by_options(**options: Any) -> dict[str, Any]:
    """Arguments of `compress` for options by their names on the command line, and for attention alone by default."""
    return arguments_of(**{"what": "attention"} | options)


def limit_cache(patch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """Keep factors of at most `n_bytes` bytes in memory, and the others in files."""
    patch.setattr("tnlib_adapters.compression.compress.limits_of", lambda _checkpoint, _request: Limits(cache=n_bytes))


def scheme_of(section: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Bits and group of a layer by the section of config.json, as engines read it; 0 for a whole column."""
    if section["quant_method"] == "gptq":  # the first rule that matches
        rules = section.get("dynamic", {}).items()
        own = next((own for rule, own in rules if re.match(rule.removeprefix("+:"), name)), section)
        return own["bits"], max(own["group_size"], 0)
    (own,) = (
        group["weights"]
        for group in section["config_groups"].values()
        if any(re.match(target.removeprefix("re:"), name) for target in group["targets"])
    )
    return own["num_bits"], own["group_size"] or 0
