"""Folder of a run: statistics used again, interrupted runs resumed, and folders of something else refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from compressed_folders import by_options  # noqa: E402
from tnlib_adapters import Budget, Calibration  # noqa: E402
from tnlib_adapters.compression.calibration import collect_calibration as observed  # noqa: E402
from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder, FittedFiles  # noqa: E402
from tnlib_adapters.compression.calibration.statistics import Statistics  # noqa: E402
from tnlib_adapters.factors.factored_matrix import FactoredMatrix  # noqa: E402
from tnlib_adapters.factors.gguf_blocks import TYPES  # noqa: E402
from tnlib_adapters.factors.integers import IntegerFormat  # noqa: E402
from tnlib_adapters.factors.rounding import round_to_nearest  # noqa: E402
from tnlib_adapters.files.safetensors_file import read_header  # noqa: E402
from transformers_models import made_up_text, quiet, random_model, save_with_tokenizer  # noqa: E402

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


@pytest.mark.parametrize("form", [IntegerFormat(3, 0, has_zero=True), *(own.form for own in TYPES.values())], ids=str)
def test_grids_of_engines_are_read_as_saved(form, tmp_path):
    integers = round_to_nearest(np.random.default_rng(0).standard_normal((256, 4)), form)
    whole = FactoredMatrix("dense", "q", {"weight": integers.values()}, module="attention")
    matrix = whole.with_integers({"weight": integers})
    files = FittedFiles(SimpleNamespace(folder=tmp_path), {}, 1)
    files.save(0, [matrix])
    ((module, (read,)),) = files.read(0).items()
    assert module == "attention"
    assert read.integers["weight"].format == form
    np.testing.assert_array_equal(read.arrays["weight"], integers.values())


def test_moments_are_saved_as_triangles_and_come_back_exactly(tmp_path):
    x = np.random.default_rng(0).standard_normal((90, 65)).astype(np.float32)
    counts, moments = x[0] ** 2, x.T @ x
    folder = CalibrationFolder(tmp_path / "seen")
    folder.claim({})
    folder.save(3, Statistics({"table": counts, "3.x": moments}, {"3.q": moments[:1, :1]}, {"3.q": np.ones(1)}))
    assert (tmp_path / "seen" / "group3.safetensors").stat().st_size < 0.6 * moments.nbytes
    read = folder.statistics(3, {"table", "3.x", "3.q"})
    np.testing.assert_equal(dict(read.reads), {"table": counts, "3.x": moments})
    np.testing.assert_equal(dict(read.slopes), {"3.q": moments[:1, :1]})


def compress(source, out, text, folder, what="attention", effort="default", **size):
    options = {"calibration": Calibration(text), "what": what, "effort": effort}
    return tnlib_adapters.compress(source, out, Budget(**size), run=tnlib_adapters.Run(folder=folder), **options)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["attention", "mlp", "all"])
@pytest.mark.parametrize("sizes", [({"keep": 0.5}, {"keep": 0.75}), ({"bits": 4}, {"bits": 5})])
def test_another_size_observes_nothing(folders, text, tmp_path, runs, what, sizes):
    compress(folders[0], tmp_path / "a", text, tmp_path / "seen", what=what, **sizes[0])
    observed = runs.count
    assert observed > 2
    compress(folders[0], tmp_path / "b", text, tmp_path / "seen", what=what, **sizes[1])
    compress(folders[0], tmp_path / "direct", text, None, what=what, **sizes[1])
    assert runs.count == 2 * observed
    assert_same_weights(tmp_path / "b", tmp_path / "direct")
    other = {"bits": 4} if "keep" in sizes[0] else {"keep": 0.5}
    with pytest.raises(ArgumentError, match=r"folder \(--folder\) must belong to this model.*another method"):
        compress(folders[0], tmp_path / "c", text, tmp_path / "seen", what=what, **other)
    stored = {file.name for file in (tmp_path / "seen").iterdir()}
    assert all(name.startswith("group") or name == "tnlib_calibration.json" for name in stored)


@pytest.mark.slow
@pytest.mark.parametrize("size", [{"keep": 0.5}, {"bits": 4}])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_goes_on_after_an_interruption_as_if_there_was_none(folders, text, tmp_path, runs, share, size):
    compress(folders[0], tmp_path / "whole", text, tmp_path / "seen", **size)
    observed, runs.count = runs.count, 0
    runs.at = int(share * observed)
    with pytest.raises(KeyboardInterrupt):
        compress(folders[0], tmp_path / "again", text, tmp_path / "part", **size)
    assert not (tmp_path / "again").exists()
    runs.at = -1
    compress(folders[0], tmp_path / "again", text, tmp_path / "part", **size)
    n_layers = tnlib_adapters.open_checkpoint(folders[0]).n_layers
    assert observed <= runs.count <= observed + observed // n_layers  # at most one block again
    assert_same_weights(tmp_path / "whole", tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("low", "low"), ("low", "default"), ("default", "low"), ("low", "high")])
def test_a_killed_run_goes_on_with_any_effort(folders, text, tmp_path, runs, first, second):
    """Streams at the inputs of blocks are deleted after the statistics, unless layers are fitted."""
    compress(folders[0], tmp_path / "whole", text, None, bits=4, effort=second)
    runs.at = runs.count + 2
    with pytest.raises(KeyboardInterrupt):
        compress(folders[0], tmp_path / "killed", text, tmp_path / "part", bits=4, effort=first)
    runs.at = -1
    compress(folders[0], tmp_path / "again", text, tmp_path / "part", bits=4, effort=second)
    assert_same_weights(tmp_path / "whole", tmp_path / "again")


@pytest.mark.slow
def test_the_folder_of_another_model_or_text_is_refused(folders, text, tmp_path, runs):
    compress(folders[0], tmp_path / "a", text, tmp_path / "seen", keep=0.5)
    observed = runs.count
    with pytest.raises(ArgumentError, match=r"folder \(--folder\) must belong to this model.*another model"):
        compress(folders[1], tmp_path / "b", text, tmp_path / "seen", keep=0.5)
    with pytest.raises(ArgumentError, match=r"another what in .*seen; name another folder"):
        compress(folders[0], tmp_path / "b", text, tmp_path / "seen", keep=0.5, what="all")
    options = {"keep": 0.5, "calibrate": text, "folder": tmp_path / "seen", "window": 8}
    with pytest.raises(ArgumentError, match="another window"):
        tnlib_adapters.compress(folders[0], tmp_path / "b", **by_options(**options))
    text.write_text(made_up_text(seed=1), encoding="utf-8")
    with pytest.raises(ArgumentError, match="another text"):
        compress(folders[0], tmp_path / "b", text, tmp_path / "seen", keep=0.5)
    assert not (tmp_path / "b").exists()
    assert runs.count == observed


@pytest.mark.slow
def test_other_files_stay_in_the_folder(folders, text, tmp_path):
    compress(folders[0], tmp_path / "a", text, tmp_path / "seen", keep=0.5)
    (tmp_path / "seen" / "notes").mkdir()
    (tmp_path / "seen" / "notes.txt").write_text("precious")
    compress(folders[0], tmp_path / "b", text, tmp_path / "seen", keep=0.4)
    groups = [f"group{k}.safetensors" for k in range(tnlib_adapters.open_checkpoint(folders[0]).n_layers)]
    stored = sorted(file.name for file in (tmp_path / "seen").iterdir())
    assert stored == sorted([*groups, "notes", "notes.txt", "tnlib_calibration.json"])


@pytest.mark.slow
def test_a_flipped_bit_is_noticed(folders, text, tmp_path):
    compress(folders[0], tmp_path / "a", text, tmp_path / "seen", keep=0.5)
    file = tmp_path / "seen" / "group0.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"group0\.safetensors was changed after it was saved"):
        compress(folders[0], tmp_path / "b", text, tmp_path / "seen", keep=0.5)


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

    def run(out, folder, stop=None, **options):
        options = {"calibrate": text, "folder": folder, "progress": interrupt_at(stop), **options}
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
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(("name", "size"), [("llama", {"bits": 3}), ("llama", {"keep": 0.6}), ("gpt2", {"keep": 0.6})])
def test_an_interrupted_fit_to_the_predictions_starts_from_the_statistics(name, size, text, tmp_path, runs, step):
    """No block is observed again, and the weights are those of a run without interruption."""
    quiet()
    source = save_with_tokenizer(random_model(name), tmp_path / name)

    def stop(stage, done, total):
        if stage == "fitting to the predictions" and done == step:
            assert total > step
            raise KeyboardInterrupt

    options = {"calibrate": text, "what": "all"} | size
    tnlib_adapters.compress(source, tmp_path / "whole", **by_options(**options))
    observed = runs.count
    with pytest.raises(KeyboardInterrupt):
        tnlib_adapters.compress(
            source, tmp_path / "again", **by_options(folder=tmp_path / "run", progress=stop, **options)
        )
    assert not (tmp_path / "again").exists()
    tnlib_adapters.compress(source, tmp_path / "again", **by_options(folder=tmp_path / "run", **options))
    assert runs.count == 2 * observed
    assert_same_weights(tmp_path / "whole", tmp_path / "again")


@pytest.mark.slow
def test_a_fit_of_another_size_starts_anew(folders, text, tmp_path):
    def stop(stage, done, total):
        if stage == "fitting layers" and done == 1:
            raise KeyboardInterrupt

    options = {"calibrate": text, "folder": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        tnlib_adapters.compress(folders[0], tmp_path / "out", **by_options(keep=0.5, progress=stop, **options))
    assert (tmp_path / "run" / "fitted0.safetensors").exists()
    tnlib_adapters.compress(folders[0], tmp_path / "out", **by_options(keep=0.4, **options))
    tnlib_adapters.compress(folders[0], tmp_path / "direct", Budget(keep=0.4), calibration=text, what="attention")
    assert_same_weights(tmp_path / "direct", tmp_path / "out")


def test_a_folder_of_other_files_is_refused(folders, text, tmp_path, runs):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    for folder, message in (
        (tmp_path / "mine", "an empty one or that of another run"),
        (tmp_path / "out" / "run", "must lie outside OUT"),
        (tmp_path, "OUT outside it"),
        (tmp_path / "nowhere" / "run", "in a folder that exists"),
        (text, "an empty one or that of another run"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compress(folders[0], tmp_path / "out", text, folder, keep=0.5)
    assert (tmp_path / "mine" / "notes").read_text() == "precious"
    assert runs.count == 0
