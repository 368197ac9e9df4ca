"""Typed reading of JSON files of unknown origin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, NoReturn

from tnlib import FileFormatError
from tnlib._json import LARGEST_JSON, parse_json


@dataclass(frozen=True)
class JsonFile:
    """Typed access to the content of a JSON file; errors name the file and the place in it.

    Parameters
    ----------
    function
        Prefix of error messages.
    path
        The file.
    remedy
        Last clause of error messages.
    """

    function: str
    path: Path
    remedy: str

    def read_bytes(self) -> bytes:
        """Return the content, at most 100 MB."""
        size = self.path.stat().st_size
        if size > LARGEST_JSON:  # before a buffer of that size is allocated
            self.refuse("", f"at most {LARGEST_JSON:,} bytes", f"{size:,}")
        return self.path.read_bytes()

    def read(self) -> Any:
        """Return the parsed content."""
        raw = self.read_bytes()
        try:
            return parse_json(raw)
        except ValueError as problem:
            raise FileFormatError(
                f"{self.function}: {self.path} must be JSON, is no JSON of the usual kind ({problem}); {self.remedy}."
            ) from None

    def refuse(self, place: str, expected: str, got: object) -> NoReturn:
        """Raise a FileFormatError; `place` is where in the file, such as "model.vocab", "" for the file itself."""
        what = got if isinstance(got, str) else f"{type(got).__name__} {short_repr(got)}"
        where = f" in {place}" if place else ""
        raise FileFormatError(f"{self.function}: {self.path} must hold {expected}{where}, got {what}; {self.remedy}.")

    def as_object(self, value: Any, place: str = "") -> dict[str, Any]:
        """Return `value` if it is a JSON object."""
        if not isinstance(value, dict):
            self.refuse(place, "a JSON object", value)
        return value

    def as_list(self, value: Any, place: str) -> list[Any]:
        """Return `value` if it is a list."""
        if not isinstance(value, list):
            self.refuse(place, "a list", value)
        return value

    def as_string(self, value: Any, place: str) -> str:
        """Return `value` if it is a string."""
        if not isinstance(value, str):
            self.refuse(place, "a string", value)
        return value

    def as_index(self, value: Any, place: str) -> int:
        """Return `value` if it is an integer from 0 to 2**31 - 1."""
        if type(value) is not int or not 0 <= value < 1 << 31:
            self.refuse(place, "an integer from 0 to 2**31 - 1", value)
        return value
