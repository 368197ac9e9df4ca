"""A checkpoint folder in, a page on what is inside out."""

from __future__ import annotations

import os

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
from tnlib_adapters.compression.calibration.text import read_text
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.files.atomic_folder import check_target, whole_folder
from tnlib_adapters.inspection.measure import Inspection, measure
from tnlib_adapters.inspection.names import PAGE
from tnlib_adapters.inspection.page import page_of
from tnlib_adapters.inspection.tokens import own_tokens, read_tokens


def inspect(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    text: str | None = None,
    text_file: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress = quiet,
) -> Inspection:
    """Write a page on what is inside a checkpoint: diagrams, compositions, spectra, gauges, patterns on a text.

    Parameters
    ----------
    source
        Folder with config.json and safetensors.
    out
        Folder to make, with `inspect.html` in it; it appears whole or not at all. The page needs no other file.
    text
        What attention is shown on; without a tokenizer in the folder, or without transformers to read it, numbers of
        tokens. None: no patterns, but of the built-in induction model, which is shown a repeated segment.
    text_file
        The same from a file in UTF-8.
    force
        Replace `out` where it has files in it.
    progress
        Called with (stage, done, total).

    Returns
    -------
    Inspection
        All that is on the page, as data.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If there are two texts, one of fewer than two tokens, one that cannot be read or run, or `out` is taken.
    FileFormatError, MissingFileError
        If `source` is no checkpoint that tnlib knows, or there is no such text file.

    Examples
    --------
    >>> import os, tempfile, tnlib_adapters
    >>> out = os.path.join(tempfile.mkdtemp(), "inside")
    >>> found = tnlib_adapters.inspect(tnlib_adapters.builtin_path(), out)
    >>> found.compositions["K"].largest(1)[0][0], found.page.name
    ((0, 3), 'inspect.html')
    """
    target = as_path("inspect", "out", out)
    if text is not None and text_file is not None:
        raise ArgumentError("inspect: text must come from one place, got text and text_file; leave one of them out.")
    if text is not None and not isinstance(text, str):
        raise ArgumentTypeError(f"inspect: text must be a string, got {type(text).__name__}; pass the text itself.")
    given = text if text_file is None else read_text("inspect", "text_file", text_file)
    checkpoint = open_checkpoint(source)
    check_target("inspect", target, checkpoint.folder.path, force=force)
    tokens = own_tokens(checkpoint) if given is None else read_tokens(checkpoint, given)
    found = measure(checkpoint, tokens, target / PAGE, progress)
    page = page_of(found, progress)
    with whole_folder(target) as partial:
        (partial / PAGE).write_text(page, encoding="utf-8")
        check_target("inspect", target, checkpoint.folder.path, force=force)
    return found
