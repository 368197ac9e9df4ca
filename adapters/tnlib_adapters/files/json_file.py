"""Reading of JSON files of unknown origin: bounded size and depth, unique keys, typed access.

Python's json accepts more than RFC 8259: UTF-16 and UTF-32, lone surrogates, NaN, repeated keys, and nesting that later
exhausts the stack in json.dumps or repr. All of these are refused, as in serde_json, which safetensors and tokenizers
use.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, NoReturn, TypeVar

from tnlib import FileFormatError

LARGEST_JSON = 100_000_000  # bytes; the limit of safetensors headers, and three times the largest tokenizer.json
_DEEPEST = 100  # serde_json stops at 127
_MOST_DIGITS = 100
_NAMES = {dict: "a JSON object", list: "a list", str: "a string"}
T = TypeVar("T", dict[str, Any], list[Any], str)
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class JsonFile:
    """Typed access to the content of a JSON file; errors name the file and the place in it."""

    function: str  # prefix of error messages
    path: Path  # the file
    remedy: str  # last clause of error messages

    def read_bytes(self) -> bytes:
        """Return the content, at most 100 MB."""
        size = self.path.stat().st_size
        if size > LARGEST_JSON:  # before a buffer of that size is allocated
            self.refuse("", f"at most {LARGEST_JSON:,} bytes", f"{size:,}")
        return self.path.read_bytes()

    def read(self) -> dict[str, Any]:
        """Return the parsed content, a JSON object."""
        raw = self.read_bytes()
        try:
            content = parse_json(raw)
        except ValueError as problem:
            raise FileFormatError(
                f"{self.function}: {self.path} must be JSON, is no JSON of the usual kind ({problem}); {self.remedy}."
            ) from None
        return self.of_type(dict, content)

    def refuse(self, place: str, expected: str, got: object) -> NoReturn:
        """Raise a FileFormatError; `place` is where in the file, such as "model.vocab", "" for the file itself."""
        what = got if isinstance(got, str) else f"{type(got).__name__} {short_repr(got)}"
        where = f" in {place}" if place else ""
        raise FileFormatError(f"{self.function}: {self.path} must hold {expected}{where}, got {what}; {self.remedy}.")

    def of_type(self, kind: type[T], value: Any, place: str = "") -> T:
        """Return `value` if it is a JSON object, a list or a string."""
        if not isinstance(value, kind):
            self.refuse(place, _NAMES[kind], value)
        return value

    def as_index(self, value: Any, place: str) -> int:
        """Return `value` if it is an integer from 0 to 2**31 - 1."""
        if type(value) is not int or not 0 <= value < 1 << 31:
            self.refuse(place, "an integer from 0 to 2**31 - 1", value)
        return value


def parse_json(raw: bytes) -> Any:
    """Return the value of a JSON text in UTF-8; raise ValueError if it is none."""
    if len(raw) > LARGEST_JSON:
        raise ValueError(f"{len(raw):,} bytes, more than {LARGEST_JSON:,}")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except RecursionError:
        raise _too_deep() from None
    if _depth_exceeds(value, _DEEPEST):
        raise _too_deep()
    if _ESCAPED_SURROGATE.search(raw):  # of a pair, or alone
        json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError
    return value


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Test if containers are nested deeper than `limit`, level by level: without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
    return bool(level)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"duplicate key {short_repr(repeated)}")
    return content


def _integer(digits: str) -> int | float:
    if digits == "-0":
        return -0.0  # as serde_json: no integer
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:40]}, which is not finite")
    return value


def _too_deep() -> ValueError:
    return ValueError(f"nested deeper than {_DEEPEST} levels")
