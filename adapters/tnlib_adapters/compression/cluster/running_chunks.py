"""Running model of a worker, and streams of the chunks of a text: the tasks of a worker share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tnlib._typing import Array
from tnlib_adapters.compression.activation_statistics.component_files import ComponentFile
from tnlib_adapters.compression.activation_statistics.selected_weights import GroupCalibration, SelectedWeights
from tnlib_adapters.compression.activation_statistics.statistics import Observations, Statistics
from tnlib_adapters.compression.cluster.factorised_parts import Job
from tnlib_adapters.compression.cluster.stored_objects import ArraysInFiles, write_in_place
from tnlib_adapters.compression.methods.out_of_core import named_entries
from tnlib_adapters.files.process_memory import reuse_free_memory
from tnlib_adapters.files.tensor_file import read_header

if TYPE_CHECKING:
    from tnlib_adapters.compression.activation_statistics.statistics import Observed
    from tnlib_adapters.instrument.block_passes import Call, Frame
    from tnlib_adapters.instrument.chunked_streams import ChunkedStreams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import Places

T = TypeVar("T")
_BATCHES, _PARTS_OF_BATCH = "batches", ("ids", "mask")


@dataclass(frozen=True)
class TextJob(Job):
    """The passes of a text that a task belongs to.

    Parameters
    ----------
    spill
        Folder of the streams and moments.
    what
        Compressed part.
    settings
        Arguments of `open_running`.
    folds_biases
        True if the biases of the model are folded.
    n_observed
        Batches that are observed, the first ones.
    """

    spill: Path
    what: str
    settings: Mapping[str, Any]
    folds_biases: bool
    n_observed: int

    def write_batches(self, batches: Sequence[Batch]) -> None:
        """Store the batches of the text."""
        arrays = {
            f"{part}-{b}": getattr(batch, part).cpu().numpy()
            for b, batch in enumerate(batches)
            for part in _PARTS_OF_BATCH
        }
        write_in_place(self.file(_BATCHES), named_entries(arrays))

    def running(self) -> RunningChunks:
        """Return the model on the chunks, opened once by every worker."""
        if self.run_id not in _running:
            _running.clear()
            reuse_free_memory()
            _running[self.run_id] = RunningChunks(self)
        return _running[self.run_id]

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder of the run."""
        return self.spill / f"{name}.safetensors"

    def read(self, name: str) -> ArraysInFiles:
        """Return the arrays of a file in the folder of the run."""
        return ArraysInFiles(read_header(self.file(name))[0])

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write a file in the folder of the run, as a whole."""
        write_in_place(self.file(name), named_entries(arrays))

    def sum(self, names: Sequence[str]) -> dict[str, Array]:
        """Return the sums of the arrays of files: pairs, then pairs of pairs, as rounding errors grow least."""
        files = [self.read(name) for name in names]
        return {key: tree_sum(itemgetter(key), files) for key in files[0]}


class RunningChunks:
    """The model of a worker, and the streams of the chunks that it runs on."""

    def __init__(self, job: TextJob) -> None:
        self._job = job
        self.weights = SelectedWeights(job.checkpoint(), job.what)
        self._calls: dict[int, list[list[Call]]] = {}
        self._calls_of_texts: dict[tuple[int, int], list[Call]] = {}

    @cached_property
    def model(self) -> RunningModel:
        """The model; weights of a block are read when it runs, if not all fit in memory."""
        from tnlib_adapters.instrument.running_model import open_running

        model = open_running(self._job.checkpoint(), **self._job.settings)
        return self.weights.folded(model) if self._job.folds_biases else model

    @cached_property
    def frame(self) -> Frame:
        """The model before and after its blocks."""
        from tnlib_adapters.instrument.block_passes import Frame

        return Frame(self.model)

    @cached_property
    def places(self) -> Places:
        """Places of the weights."""
        return self.weights.places(self.model)

    @cached_property
    def streams(self) -> ChunkedStreams:
        """Streams of all batches."""
        import torch

        from tnlib_adapters.instrument.chunked_streams import ChunkedStreams
        from tnlib_adapters.instrument.running_model import Batch

        stored, d_model = self._job.read(_BATCHES), self._job.checkpoint().sizes.d_model
        placement = self._job.settings["placement"]

        def batch(b: int) -> Batch:
            ids, mask = (placement.place(torch.from_numpy(stored[f"{part}-{b}"])) for part in _PARTS_OF_BATCH)
            return Batch(ids, mask, is_padded=not bool(mask.all()))

        batches = [batch(b) for b in range(len(stored) // len(_PARTS_OF_BATCH))]
        return ChunkedStreams(self._job.spill, batches, d_model, self._job.n_observed, placement.dtype)

    def calls(self, c: int) -> list[list[Call]]:
        """Return the further arguments of every block by batch of a chunk, and store the input of the first block."""
        from tnlib_adapters.instrument.block_passes import enter

        if c not in self._calls:
            self._calls[c] = enter(self.frame, self.streams.chunks[c][1])
        return self._calls[c]

    def call_of_texts(self, b: int, texts: slice, k: int) -> Call:
        """Return the further arguments of the k-th block for some texts of a batch."""
        import torch

        from tnlib_adapters.instrument.running_model import Batch

        key = (b, texts.start)
        if key not in self._calls_of_texts:
            batch = self.streams.batches[b]
            with torch.no_grad():
                self._calls_of_texts[key] = self.frame.enter(
                    Batch(batch.ids[texts], batch.mask[texts], batch.is_padded)
                )[1]
        return self._calls_of_texts[key][k]

    def observations(self, c: int) -> Observations:
        """Return the inputs and gradients of a chunk."""
        batches, streams = self.streams.chunks[c]
        return Observations(self.frame, self.places, streams.batches, streams, first=batches.start)

    def observed(self, c: int, group: int, probe: int) -> Iterable[Observed]:
        """Return the inputs and gradients of a chunk at the weights of a group."""
        from tnlib_adapters.instrument.stored_weights import OUTSIDE

        observations = self.observations(c)
        return observations.outside(probe) if group == OUTSIDE else observations.of_block(group, probe, self.calls(c))

    def components_of_group(self, group: int, moments: Statistics) -> GroupCalibration:
        """Return the components of the weights of a group by these moments."""
        file = ComponentFile(self._job.file(f"components{group}"))
        return self.weights.of_group(group, self.places, moments, self.model.device, file)

    def has_gradient(self, c: int, probe: int, k: int) -> bool:
        """Test if the gradients of a probe at the input of the k-th block are stored, True for none outside."""
        from tnlib_adapters.instrument.stored_weights import OUTSIDE

        return k == OUTSIDE or self.streams.chunks[c][1].has(f"gradient-{probe}-{k}")


_running: dict[str, RunningChunks] = {}  # of this process; at most one


def tree_sum(read: Callable[[T], Array], items: Sequence[T]) -> Array:
    """Return the sum of the arrays that `read` returns of at least one item: pairs, then pairs of pairs."""
    if len(items) == 1:
        return read(items[0])
    first, second = halves(items)
    total: Array = tree_sum(read, first) + tree_sum(read, second)
    return total


def halves(items: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the items whose sums `tree_sum` adds in the end."""
    half = (len(items) + 1) // 2
    return items[:half], items[half:]
