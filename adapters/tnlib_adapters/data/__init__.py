"""Trained models in this package, and sequences to measure them on."""

from __future__ import annotations

from pathlib import Path

from tnlib._errors import ArgumentError
from tnlib._validate import is_one_of

_NAMES = ("induction", "llama", "known_circuit")


def builtin_path(name: str = "induction") -> Path:
    """Return the checkpoint folder of a built-in model.

    Parameters
    ----------
    name : str
        Name of the model. ``"induction"``: two attention-only layers, trained to continue a repeated segment of random
        tokens. ``"llama"``: a language model of Python's standard library in transformers' format, with rotary
        embeddings, RMSNorm, four layers of eight heads with two key and value heads, and a tokenizer.
        ``"known_circuit"``: a GPT-2 of two layers, trained so that six known edges alone matter; its task and its edges
        are in `tnlib_adapters.data.coded_letters`.

    Returns
    -------
    pathlib.Path
        The folder inside the installed package, with ``config.json`` and ``model.safetensors``.

    Raises
    ------
    ArgumentError
        If no built-in model has that name.

    Examples
    --------
    >>> folder = builtin_path("induction")
    >>> sum(file.stat().st_size for file in folder.iterdir()) < 10**6
    True
    >>> len(list(folder.glob("*.safetensors")))
    1
    >>> from tnlib_adapters import open_checkpoint
    >>> open_checkpoint(builtin_path("llama")).n_layers
    4
    """
    if not is_one_of(name, _NAMES):
        names = ", ".join(map(repr, _NAMES))
        raise ArgumentError(f"builtin_path: name must be one of {names}, got {name!r}; choose one of them.")
    return Path(__file__).parent / name
