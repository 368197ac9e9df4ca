"""The model card of a folder, README.md, with and without the note that a compression puts on top."""

from __future__ import annotations

import re

NOTE = "> Compressed by tnlib"  # the first words of the note
_FRONT_MATTER = re.compile(rb"(?:\xef\xbb\xbf)?---[ \t]*\r?\n(?:.*\n)*?---[ \t]*\r?(?:\n|\Z)")
_NOTE = re.compile(rb"\s*%b.*\n(?:>.*\n)*" % NOTE.encode())


def split_card(card: bytes) -> tuple[bytes, bytes]:
    r"""Return the YAML front matter of a model card, and the rest without the note.

    >>> split_card(b"> Compressed by tnlib, which ...\n> It loads ...\n\n# Model\n")
    (b'', b'\n# Model\n')
    """
    front = _FRONT_MATTER.match(card)
    head, body = (front[0].rstrip() + b"\n\n", card[front.end() :]) if front else (b"", card)
    note = _NOTE.match(body)
    return head, body[note.end() :] if note else body


def without_note(card: bytes) -> bytes:
    """Return a model card without the note."""
    head, body = split_card(card)
    return head + body.lstrip(b"\r\n")
