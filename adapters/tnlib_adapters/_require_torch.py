"""The check for optional frameworks."""

from __future__ import annotations

import importlib


def require_torch(package: str) -> None:
    """Import torch and transformers, or raise ModuleNotFoundError with the command that installs them."""
    try:
        importlib.import_module("torch")
        importlib.import_module("transformers")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{package} needs torch and transformers, found no {missing.name}; pip install 'tnlib[torch]'.",
            name=missing.name,
        ) from None
