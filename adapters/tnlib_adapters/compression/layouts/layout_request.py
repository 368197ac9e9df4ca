"""Validated options of `compress` for the layouts of `SMALLER_MODELS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from tnlib import ArgumentError, ArgumentTypeError
from tnlib_adapters.compression.layouts.layout_table import SMALLER_MODELS, Layout
from tnlib_adapters.compression.request import Request

# options of `Request` that these layouts have too
_READ = ("keep", "calibrate", "calibration_tokens", "device", "dtype")


@dataclass(frozen=True)
class LayoutRequest:
    """Layout, and its sizes or the fraction of the numbers that is stored.

    Parameters
    ----------
    layout
        Row of the table.
    sizes
        Requested values of keys of config.json; {} if `source.keep` is given.
    source
        Options on the checkpoint and the text, for `open_source`.
    """

    layout: Layout
    sizes: Mapping[str, int]
    source: Request

    @classmethod
    def of(cls, sizes: Mapping[str, int] | None, *, layout: str, **options: Any) -> Self:
        """Return the request for the options of `compress` by name."""
        if layout not in SMALLER_MODELS:
            raise ArgumentError(
                f"compress: sizes must come with layout {' or '.join(map(repr, SMALLER_MODELS))}, got {layout!r}; pass "
                "keep."
            )
        row, keep, named = SMALLER_MODELS[layout], options["keep"], dict(sizes or {})
        defaults = {field.name: field.default for field in fields(Request)}
        for name, value in options.items():
            if name not in _READ and value != defaults.get(name):
                raise ArgumentError(
                    f"compress: {name} must be left out with layout {layout!r}, got {value!r}; its size is that of "
                    f"keep, or of sizes ({', '.join(row.sizes)})."
                )
        if (keep is None) == (not named):
            raise ArgumentError(
                f"compress: either keep or sizes must be given with layout {layout!r}, got "
                f"{'neither' if keep is None else 'both'}; pass for example keep=0.5 (--keep 0.5), or sizes="
                f"{{{row.sizes[0]!r}: 64}} (--size {row.sizes[0]}=64)."
            )
        if row.sizes_required and keep is not None:
            raise ArgumentError(
                f"compress: keep must be left out with layout {layout!r}, because {row.sizes_required}, got {keep!r}; "
                f"pass sizes ({', '.join(f'--size {key}=N' for key in row.sizes)})."
            )
        for key, value in named.items():
            _check_size(row, key, value)
        if options["calibrate"] is None:
            raise ArgumentError(
                f"compress: layout {layout!r} needs a text, got none; pass a file as calibrate (--calibrate TEXT)."
            )
        read = {name: options.get(name) if name in _READ else default for name, default in defaults.items()}
        source = Request.of(**read | {"keep": 1.0 if keep is None else keep, "method": ""})
        return cls(row, named, source)

    @property
    def keep(self) -> float | None:
        """Requested fraction of the numbers; None if sizes are requested."""
        return None if self.sizes else self.source.keep


def _check_size(row: Layout, key: str, value: Any) -> None:
    if key not in row.sizes:
        raise ArgumentError(
            f"compress: sizes of layout {row.name!r} must be among {', '.join(row.sizes)}, got {key!r}; choose one of "
            "them."
        )
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"compress: {key} in sizes must be an integer, got {value!r}; pass for example 64.")


def check_at_most(key: str, value: int, most: int) -> int:
    """Return a requested size, from 1 to that of the original."""
    if not 1 <= value <= most:
        raise ArgumentError(
            f"compress: {key} in sizes must lie between 1 and {most}, the size of this model, got {value}; choose "
            "another."
        )
    return value
