"""Statistics that are kept in a file: used again, gone on with, and refused where they are of something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from compressed_folders import by_options  # noqa: E402
from tnlib_adapters import Budget, Calibration  # noqa: E402
from tnlib_adapters.files.tensor_file import Entry, read_header, write_tensor_file  # noqa: E402
from tnlib_adapters.instrument import weight_inputs as observed  # noqa: E402
from transformers_models import made_up_text, quiet, random_model, save_with_tokenizer  # noqa: E402  # noqa: E402

from tnlib import ArgumentError, FileFormatError  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    quiet()
    model, found = random_model("bert"), []
    for k in range(2):
        with torch.no_grad():
            next(model.parameters())[3, 0] += k
        found.append(save_with_tokenizer(model, tmp_path_factory.mktemp(f"seen_{k}")))
    return found


@pytest.fixture
def text(tmp_path):
    """Text of several batches."""
    file = tmp_path / "text.txt"
    file.write_text(made_up_text(500), encoding="utf-8")
    return file


@pytest.fixture
def runs(monkeypatch):
    """Count how often a block is observed; `at` interrupts one of these."""

    class Counted:
        count, at = 0, -1

    observe = observed.observe_block

    def counting(*args):
        if Counted.count == Counted.at:
            raise KeyboardInterrupt
        Counted.count += 1
        return observe(*args)

    monkeypatch.setattr(observed, "observe_block", counting)
    return Counted


def assert_same_weights(*folders: Path) -> None:
    one, other = (read_header(folder / "model.safetensors")[0] for folder in folders)
    for name, info in one.items():
        np.testing.assert_array_equal(other[name].read(), info.read())


def compress(source, out, text, file, keep=0.5, what="attention", bits=None):
    keep = keep if bits is None else None
    return tnlib_adapters.compress(
        source, out, Budget(keep=keep, bits=bits), calibration=Calibration(text, statistics=file), what=what
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["attention", "mlp", "all"])
@pytest.mark.parametrize("sizes", [({"keep": 0.5}, {"keep": 0.75}), ({"bits": 4}, {"bits": 5})])
def test_another_size_observes_nothing(folders, text, tmp_path, runs, what, sizes):
    compress(folders[0], tmp_path / "a", text, tmp_path / "seen", what=what, **sizes[0])
    observed = runs.count
    assert observed > 2
    compress(folders[0], tmp_path / "b", text, tmp_path / "seen", what=what, **sizes[1])
    assert runs.count == observed
    other = {"bits": 4} if "keep" in sizes[0] else {"keep": 0.5}
    compress(folders[0], tmp_path / "c", text, tmp_path / "seen", what=what, **other)
    assert runs.count == observed
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".partial")]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4], ids=["calibrated", "quantized"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_goes_on_after_an_interruption_as_if_there_was_none(folders, text, tmp_path, runs, share, bits):
    compress(folders[0], tmp_path / "whole", text, tmp_path / "seen", bits=bits)
    observed, runs.count = runs.count, 0
    runs.at = int(share * observed)
    with pytest.raises(KeyboardInterrupt):
        compress(folders[0], tmp_path / "again", text, tmp_path / "part", bits=bits)
    assert not (tmp_path / "again").exists()
    runs.at = -1
    compress(folders[0], tmp_path / "again", text, tmp_path / "part", bits=bits)
    n_layers = tnlib_adapters.open_checkpoint(folders[0]).n_layers
    assert observed <= runs.count <= observed + observed // n_layers  # at most one block again
    assert not (tmp_path / "part.partial").exists()
    assert_same_weights(tmp_path / "whole", tmp_path / "again")


@pytest.mark.slow
def test_statistics_of_another_model_or_text_are_refused(folders, text, tmp_path):
    compress(folders[0], tmp_path / "a", text, tmp_path / "seen")
    before = (tmp_path / "seen").read_bytes()
    with pytest.raises(ArgumentError, match=r"statistics must be those of this model.*another model"):
        compress(folders[1], tmp_path / "b", text, tmp_path / "seen")
    with pytest.raises(ArgumentError, match=r"another value of what"):
        compress(folders[0], tmp_path / "b", text, tmp_path / "seen", what="all")
    with pytest.raises(ArgumentError, match=r"--window \d+, this being 8, in .*seen; name another file"):
        tnlib_adapters.compress(
            folders[0],
            tmp_path / "b",
            **by_options(keep=0.5, calibrate=text, statistics=tmp_path / "seen", window=8),
        )
    text.write_text(made_up_text(seed=1), encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"another text"):
        compress(folders[0], tmp_path / "b", text, tmp_path / "seen")
    assert not (tmp_path / "b").exists()
    assert (tmp_path / "seen").read_bytes() == before


def test_other_files_are_refused_before_any_work(folders, text, tmp_path, runs):
    damaged = tmp_path / "other"
    damaged.write_bytes(b"no statistics")
    with pytest.raises(FileFormatError, match=r"compress: .*holds no statistics"):
        compress(folders[0], tmp_path / "out", text, damaged)
    assert damaged.read_bytes() == b"no statistics"
    with pytest.raises(FileFormatError, match="holds no statistics"):
        compress(folders[0], tmp_path / "out", text, folders[0] / "model.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(ArgumentError, match="must lie outside OUT"):
        compress(folders[0], tmp_path / "out", text, tmp_path / "out" / "seen")
    with pytest.raises(ArgumentError, match="a folder that exists"):
        compress(folders[0], tmp_path / "out", text, tmp_path / "nowhere" / "seen")
    assert runs.count == 0


@pytest.mark.parametrize(
    ("left_out", "changed", "words"),
    [
        ({"slopes.1.k"}, {}, "changed after it was saved"),
        pytest.param(set(), {"version": "4"}, "version 4, this is version 7", marks=pytest.mark.slow),  # of 0.1
    ],
)
def test_rewritten_statistics_are_refused(folders, text, tmp_path, left_out, changed, words):
    file = tmp_path / "seen"
    compress(folders[0], tmp_path / "a", text, file)
    tensors, metadata = read_header(file)
    assert left_out <= tensors.keys()
    entries = [Entry(name, info.dtype, info.read()) for name, info in tensors.items() if name not in left_out]
    for _ in write_tensor_file(file, entries, metadata | changed):
        pass
    with pytest.raises(FileFormatError, match=words):
        compress(folders[0], tmp_path / "b", text, file)


def test_a_flipped_bit_is_noticed(folders, text, tmp_path):
    file = tmp_path / "seen"
    compress(folders[0], tmp_path / "a", text, file)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(FileFormatError, match="changed after it was saved"):
        compress(folders[0], tmp_path / "b", text, file)


def test_a_spill_folder_is_resumed_and_removed(folders, text, tmp_path, runs):
    spill = tmp_path / "spill"
    options = {"keep": 0.5, "calibrate": text, "spill": spill}
    runs.at = 20
    with pytest.raises(KeyboardInterrupt):
        tnlib_adapters.compress(folders[0], tmp_path / "out", **by_options(**options))
    assert spill.is_dir()
    with pytest.raises(ArgumentError, match="must belong to this model, text and choice of weights"):
        tnlib_adapters.compress(folders[1], tmp_path / "out", **by_options(**options))
    runs.at = -1
    tnlib_adapters.compress(folders[0], tmp_path / "out", **by_options(**options))
    assert not spill.exists()


@pytest.mark.slow
@pytest.mark.parametrize("size", [{"keep": 0.5}, {"bits": 3}], ids=["calibrated", "quantized"])
def test_an_interrupted_fit_goes_on_at_its_block(folders, text, tmp_path, size):
    n_layers = tnlib_adapters.open_checkpoint(folders[0]).n_layers
    last, fitted = n_layers - 1, list[int]()

    def interrupt_at(stop):
        def progress(stage, done, total):
            if stage == "fitting layers" and done < total:
                if done == stop:
                    raise KeyboardInterrupt
                fitted.append(done)

        return progress

    def run(out, spill, stop=None, **options):
        options = {"calibrate": text, "spill": spill, "progress": interrupt_at(stop), **options}
        tnlib_adapters.compress(folders[0], tmp_path / out, **by_options(**options))

    run("whole", tmp_path / "one", **size)
    fitted.clear()
    with pytest.raises(KeyboardInterrupt):
        run("again", tmp_path / "two", last, **size)

    with pytest.raises(KeyboardInterrupt):  # killed a second time, before anything more is done
        run("again", tmp_path / "two", last, **size)
    run("again", tmp_path / "two", **size)
    assert fitted == list(range(n_layers))
    assert_same_weights(tmp_path / "whole", tmp_path / "again")


@pytest.mark.slow
def test_a_fit_of_another_size_starts_anew(folders, text, tmp_path):
    def stop(stage, done, total):
        if stage == "fitting layers" and done == 1:
            raise KeyboardInterrupt

    options = {"calibrate": text, "spill": tmp_path / "spill"}
    with pytest.raises(KeyboardInterrupt):
        tnlib_adapters.compress(folders[0], tmp_path / "out", **by_options(keep=0.5, progress=stop, **options))
    assert (tmp_path / "spill" / "fitted0.safetensors").exists()
    tnlib_adapters.compress(folders[0], tmp_path / "out", **by_options(keep=0.4, **options))
    tnlib_adapters.compress(folders[0], tmp_path / "direct", Budget(keep=0.4), calibration=text, what="attention")
    assert_same_weights(tmp_path / "direct", tmp_path / "out")


def test_a_folder_of_other_files_is_no_spill(folders, text, tmp_path, runs):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    for spill, message in (
        (tmp_path / "mine", "an empty one or that of an interrupted run"),
        (tmp_path / "out" / "spill", "must lie outside OUT"),
        (tmp_path / "nowhere" / "spill", "in a folder that exists"),
        (text, "an empty one or that of an interrupted run"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tnlib_adapters.compress(folders[0], tmp_path / "out", **by_options(keep=0.5, calibrate=text, spill=spill))
    assert (tmp_path / "mine" / "notes").read_text() == "precious"
    assert runs.count == 0
