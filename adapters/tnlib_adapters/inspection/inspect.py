"""Write the inspection page of a checkpoint folder."""

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
    """Write the inspection page of a checkpoint: diagrams, composition, spectra, gauge freedom, attention patterns.

    Parameters
    ----------
    source
        Checkpoint folder with config.json and safetensors.
    out
        Output folder for `inspect.html`, created atomically. The page is self-contained.
    text
        Text for the attention patterns; token numbers if the folder has no tokenizer or transformers is not installed.
        None: no patterns, except for the built-in induction model, which gets a repeated segment.
    text_file
        File with that text, in UTF-8.
    force
        Replace `out` if it is not empty.
    progress
        Called as progress(stage, done, total).

    Returns
    -------
    Inspection
        The contents of the page, as data.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If two texts are given, a text has fewer than two tokens or cannot be read or run, or `out` exists.
    FileFormatError, MissingFileError
        If `source` is not a supported checkpoint, or the text file does not exist.

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
    source_text = text if text_file is None else read_text("inspect", "text_file", text_file)
    checkpoint = open_checkpoint(source)
    check_target("inspect", target, checkpoint.folder.path, force=force)
    tokens = own_tokens(checkpoint) if source_text is None else read_tokens(checkpoint, source_text)
    inspection = measure(checkpoint, tokens, target / PAGE, progress)
    page = page_of(inspection, progress)
    with whole_folder(target) as partial:
        (partial / PAGE).write_text(page, encoding="utf-8")
        check_target("inspect", target, checkpoint.folder.path, force=force)
    return inspection
