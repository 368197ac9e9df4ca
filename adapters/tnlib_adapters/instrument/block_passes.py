"""Forward and backward passes of a model block by block, over all batches, with what is between blocks stored.

One block is in memory at a time. A forward pass stores the input of every block; a backward pass runs every block once
more from its stored input, last to first.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tnlib._typing import Array
from tnlib_adapters.instrument.running_model import Batch, Part, RunningModel

Admits = Callable[[Any, int], bool]  # test if an array may take so many bytes of memory until it is deleted
Call = tuple[tuple[Any, ...], dict[str, Any]]  # further positional and keyword arguments of a block


class Streams:
    """Residual streams of batches, or gradients at them, by name: in memory if `admits` allows it, else in files.

    The file of a name is in `folder`, by default a temporary one that is removed with the object. Numbers are stored in
    bfloat16 if `dtype`, that of the blocks, is bfloat16, otherwise in float32: gradients of deep models are outside the
    range of float16. `keeps_inputs` is True if those at the inputs of blocks stay for a fit once they were used.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        width: int,
        dtype: torch.dtype = torch.float32,
        *,
        folder: Path | None = None,
        admits: Admits | None = None,
        keeps_inputs: bool = True,
    ) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="tnlib-"))
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.batches, self.keeps_inputs, self._width, self._admits = batches, keeps_inputs, width, admits
        self._held = dict[str, Array]()  # bytes of those in memory
        self._dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self._shapes = [tuple(batch.ids.shape) for batch in batches]
        sizes = [self._dtype.itemsize * width * texts * tokens for texts, tokens in self._shapes]
        self._starts, self._n_bytes = [sum(sizes[:k]) for k in range(len(sizes))], sum(sizes)

    def split(self, n_tokens: int) -> Streams:
        """Return these streams in batches of at most `n_tokens` tokens, or of one text; files go with this object."""
        parts = list[Batch]()
        for batch in self.batches:
            n_texts = max(1, n_tokens // batch.ids.shape[1])
            starts = range(0, len(batch.ids), n_texts)
            parts += [batch.part((slice(start, start + n_texts), slice(None))) for start in starts]
        # texts are stored one after the other
        split = Streams(
            parts, self._width, self._dtype, folder=self.folder, admits=self._admits, keeps_inputs=self.keeps_inputs
        )
        split._held = self._held
        return split

    def has(self, name: str) -> bool:
        """Test if streams are stored, those of all batches that were written."""
        return name in self._held or (self.folder / name).exists()

    def write(self, name: str, k: int, stream: Tensor) -> None:
        """Store the stream of the k-th batch, to be read after `finish`."""
        file, start = self.folder / f"{name}.partial", self._starts[k]
        stored = stream.detach().to(self._dtype).cpu().contiguous().flatten().view(torch.uint8).numpy()
        if self._admits is not None and file.name not in self._held and not file.exists():
            empty = np.empty(self._n_bytes, np.uint8)
            if self._admits(empty, empty.nbytes):
                self._held[file.name] = empty
        held = self._held.get(file.name)
        if held is not None:
            held[start : start + len(stored)] = stored
            return
        with file.open("r+b" if file.exists() else "w+b") as opened:
            opened.seek(start)
            opened.write(stored.data)

    def read(self, name: str, k: int) -> Tensor:
        """Return the stream of the k-th batch, (texts, tokens, width), in float32, on the device of the batch."""
        texts, tokens = self._shapes[k]
        n_bytes = self._dtype.itemsize * texts * tokens * self._width
        start, held = self._starts[k], self._held.get(name)
        if held is None:
            stored = np.fromfile(self.folder / name, np.uint8, n_bytes, offset=start)
        else:
            stored = held[start : start + n_bytes].copy()
        values = torch.from_numpy(stored).view(self._dtype).view(texts, tokens, self._width)
        return values.to(self.batches[k].ids.device).float()

    def finish(self, name: str) -> None:
        """Declare the streams of all batches stored."""
        held = self._held.pop(f"{name}.partial", None)
        if held is not None:
            self._held[name] = held
            return
        self._held.pop(name, None)  # an earlier one
        (self.folder / f"{name}.partial").replace(self.folder / name)

    def remove(self, name: str) -> None:
        """Delete the streams of all batches."""
        self._held.pop(name, None)
        (self.folder / name).unlink(missing_ok=True)


class _Entered(Exception):
    """Raised at the last block, whose output is not needed."""


class OuterLayers:
    """Computations of a model before and after its blocks, with the weights of at most one block in memory."""

    def __init__(self, model: RunningModel) -> None:
        self.model = model
        self._beside: tuple[Any, ...] | None = None  # what the first block returns besides its output; None for nothing
        self._has_run = False  # the first block

    def enter(self, batch: Batch) -> tuple[Tensor, list[Call]]:
        """Return the input of the first block, and the further arguments of every block.

        Gradients flow to the embeddings if they are enabled.
        """
        entering, calls = list[Tensor](), list[Call]()

        def forward(k: int, *args: Any, **kwargs: Any) -> Any:
            x, call = split_call(args, kwargs)
            entering.append(x)
            calls.append(call)
            # until it is known what blocks return, and always of T5: its first block makes a bias for all others
            if k == 0 and (not self._has_run or self.model.wiring.layers[0].attention.relative_bias is not None):
                self.model.load(0)
                block = self.model.layers[0].block
                with torch.no_grad():
                    out = type(block).forward(block, *args, **kwargs)
                self._beside, self._has_run = out[1:] if isinstance(out, tuple) else None, True
            if k + 1 == len(self.model.layers):
                raise _Entered
            return self._returned(x)

        with self._replaced(forward), suppress(_Entered):
            self.model(batch)
        return entering[0], calls

    def leave(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the output of the model for the output of the last block; gradients flow to x."""
        last = len(self.model.layers) - 1
        if not self._has_run:
            with torch.no_grad():
                self.enter(batch)

        def forward(k: int, *args: Any, **kwargs: Any) -> Any:
            return self._returned(x.to(self.model.dtype) if k == last else split_call(args, kwargs)[0])

        with self._replaced(forward):
            return self.model(batch)

    def _returned(self, x: Tensor) -> Any:
        return x if self._beside is None else (x, *self._beside)

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Let blocks compute forward(k, ...) inside, and load no weights for it."""
        blocks: list[Any] = [layer.block for layer in self.model.layers]
        for k, block in enumerate(blocks):
            block.forward = partial(forward, k)
        try:
            with self.model.weights.paused():
                yield
        finally:
            for block in blocks:
                del block.forward


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """Return the stream that a block is called with, and its further arguments."""
    if args:
        return args[0], (args[1:], kwargs)
    return kwargs["hidden_states"], ((), {name: value for name, value in kwargs.items() if name != "hidden_states"})


def run_block(model: RunningModel, k: int, x: Tensor, call: Call) -> Tensor:
    """Return the output of the k-th block."""
    model.load(k)
    args, kwargs = call
    out = model.layers[k].block(x.to(model.dtype), *args, **kwargs)
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)


def forward(
    outer: OuterLayers,
    streams: Streams,
    step: Callable[[int, int], None] = lambda _block, _batch: None,
    *,
    inputs: Collection[int] | None = None,
) -> list[list[Call]]:
    """Store the inputs of some blocks, "stream-0" and so on, and the output of the last; `inputs` None for all blocks.

    Returns the further arguments of every block by batch. Streams that are stored already are used again; those on the
    way to a missing one are removed, unless they are among `inputs`. `step` is called with the indices of the block
    and of the batch, before each.
    """
    n = len(outer.model.layers)
    wanted = {*(range(n) if inputs is None else inputs), n}
    missing = [k for k in wanted if not streams.has(f"stream-{k}")]
    start = max((k for k in range(min(missing, default=0)) if streams.has(f"stream-{k}")), default=0)
    calls = enter(outer, streams, store=bool(missing) and start == 0)
    with torch.no_grad():
        for k in range(start, max(missing, default=0)):
            if not streams.has(f"stream-{k + 1}"):
                for b in range(len(streams.batches)):
                    step(k, b)
                    x = run_block(outer.model, k, streams.read(f"stream-{k}", b), calls[b][k])
                    streams.write(f"stream-{k + 1}", b, x)
                streams.finish(f"stream-{k + 1}")
            if k not in wanted:
                streams.remove(f"stream-{k}")
    return calls


def enter(outer: OuterLayers, streams: Streams, *, store: bool) -> list[list[Call]]:
    """Return the further arguments of every block by batch; store the input of the first, "stream-0", if `store`.

    It is not stored again.
    """
    calls, known, is_stored = [], dict[Any, Tensor](), not store or streams.has("stream-0")
    with torch.no_grad():
        for b, batch in enumerate(streams.batches):
            x, of_batch = outer.enter(batch)
            if not is_stored:
                streams.write("stream-0", b, x)
            calls.append(_shared(of_batch, known, {}))
    if not is_stored:
        streams.finish("stream-0")
    return calls


def _shared(value: Any, known: dict[Any, Tensor], of_batch: dict[int, Tensor]) -> Any:
    """Return arguments with every tensor replaced by an equal one that is known: masks of long texts take much memory.

    `of_batch` has those that were replaced already, by the identity of the tensor.
    """
    if isinstance(value, Tensor):
        if id(value) not in of_batch:
            digest = hashlib.sha256(value.cpu().contiguous().flatten().view(torch.uint8).numpy().data).digest()
            of_batch[id(value)] = known.setdefault((value.dtype, value.shape, value.stride(), digest), value)
        return of_batch[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_shared(item, known, of_batch) for item in value)
    if type(value) is dict:
        return {name: _shared(item, known, of_batch) for name, item in value.items()}
    return value


class Outputs:
    """Outputs of a model for batches, each computed when it is used from the stored output of the last block.

    The model runs block by block on all batches, once; progress is called as progress(done, total).
    """

    def __init__(
        self, model: RunningModel, batches: Sequence[Batch], progress: Callable[[int, int], None], admits: Admits
    ) -> None:
        self._outer = OuterLayers(model)
        self._streams = Streams(batches, model.sizes.d_model, admits=admits)
        total = len(model.layers) * len(batches)
        forward(self._outer, self._streams, lambda k, b: progress(k * len(batches) + b, total), inputs=())
        progress(total, total)
        model.drop()

    def of_batch(self, b: int) -> Tensor:
        """Return the output for the b-th batch, as the model does."""
        return next(self.of_parts(b, [(slice(None), slice(None))]))

    def of_parts(self, b: int, parts: Iterable[Part]) -> Iterator[Tensor]:
        """Yield the output for parts of the b-th batch."""
        batch, last = self._streams.batches[b], self._streams.read(f"stream-{len(self._outer.model.layers)}", b)
        for at in parts:
            with torch.no_grad():
                out = self._outer.leave(last[at], batch.part(at))
            yield out
