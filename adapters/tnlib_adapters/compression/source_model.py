"""The checkpoint that is compressed: as a running model loaded once, and with its vectors kept in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.files.tensor_file import TensorInfo
from tnlib_adapters.files.tokenizer import MAX_TOKENS

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.stored_weights import Change


class SourceModel:
    """A checkpoint as a running model, made at its first use and only once.

    Every step that changes weights works on a copy and drops it.

    Parameters
    ----------
    checkpoint
        Of a model of text, with its tokenizer.
    max_tokens
        Tokens that are read of each line of a text, or in each window.
    function
        Calling function, for messages.
    """

    def __init__(self, checkpoint: Checkpoint, max_tokens: int = MAX_TOKENS, function: str = "compress") -> None:
        self.checkpoint, self.max_tokens, self.function = checkpoint, max_tokens, function

    @cached_property
    def original(self) -> RunningModel:
        """The model with its original weights, which must not be changed.

        Raises
        ------
        FileFormatError
            If transformers does not know it, a tensor is missing or left over, or a weight is NaN or inf.
        """
        from tnlib_adapters.instrument.running_model import open_running

        return open_running(self.checkpoint, self.function, self.max_tokens)

    def copy(self, change: Change | None = None) -> RunningModel:
        """Return a copy of the original, whose weights may be changed; `change` is applied to every group of them."""
        return self.original.changed(change)


class _Vector(TensorInfo):
    """A tensor that stays in memory once it is read."""

    @cached_property
    def _stored(self) -> Array:
        values = super().read_stored()
        values.flags.writeable = False
        return values

    def read_stored(self) -> Array:
        """Return the numbers as stored, read-only."""
        return self._stored


def with_vectors_in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same checkpoint, whose biases and norms stay in memory: all steps of a compression read these."""
    tensors = dict(checkpoint.folder.tensors)
    tensors |= {name: _Vector(**vars(info)) for name, info in tensors.items() if len(info.shape) == 1}
    return replace(checkpoint, folder=replace(checkpoint.folder, tensors=tensors))
