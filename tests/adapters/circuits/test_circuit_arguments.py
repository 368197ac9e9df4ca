"""What a user may pass by mistake is refused in one sentence, by the function that was called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from oracles import normal, refused
from tnlib_adapters import Checkpoint, builtin_path, circuits, freeze, open_checkpoint, save_checkpoint
from tnlib_adapters.reference.model import Forward, loss, run
from tnlib_adapters.reference.weights import read_weights

from tnlib import ArgumentError

TOKENS = np.tile(np.arange(5, 15), 2)
MASK = np.arange(20) > 10
# functions of a model with one residual stream, and further arguments
OF_ONE_STREAM = [
    (circuits.compositions, ("K",)),
    (circuits.subspace_overlaps, ("O", "K")),
    (circuits.split_stream, (TOKENS,)),
    (circuits.edge_effects, (TOKENS, MASK)),
    (circuits.singular_vector_effects, (TOKENS, MASK, 0, 0)),
    (circuits.qk_attributions, (TOKENS,)),
    (circuits.find_induction, ()),
    (circuits.read_head, (2, 0)),
    (circuits.copying, (2, 0)),
    (circuits.copying_scores, ()),
    (circuits.bigrams, ()),
    (circuits.score_shares, (2, 0)),
    (circuits.repeat_scores, ()),
    (circuits.weight_scores, ()),
    (circuits.read_vocabulary, ()),
    (circuits.block_diagram, (0,)),
    (circuits.ten_terms, (TOKENS,)),
    (freeze, (TOKENS,)),
]


# functions of tokens, by their name of these
OF_TOKENS: dict[str, tuple[str, Callable[[Checkpoint, Any], Any]]] = {
    "bigrams": ("tokens", lambda model, ids: circuits.bigrams(model, ids).successors),
    "find_induction": ("text", lambda model, ids: circuits.find_induction(model, n=2, length=8, text=ids).effect),
    "pattern_scores": (
        "tokens",
        lambda model, ids: circuits.pattern_scores(run(model, TOKENS).patterns, ids).induction,
    ),
    "score_shares": ("tokens", lambda model, ids: circuits.score_shares(model, 0, 3, tokens=ids).shares),
}


@pytest.mark.parametrize("name", sorted(OF_TOKENS))
def test_tokens_are_those_of_a_tokenizer(model: Checkpoint, name: str) -> None:
    parameter, function = OF_TOKENS[name]
    expected = function(model, TOKENS)
    mask = np.ones_like(TOKENS)
    for ids in ({"input_ids": TOKENS.tolist(), "attention_mask": mask}, TOKENS[None], TOKENS.astype(np.uint8)):
        assert np.array_equal(function(model, ids), expected, equal_nan=True)
    with refused(TypeError, f"{name}: {parameter} must be token numbers, got the text 'some'", '["input_ids"]'):
        function(model, "some")
    with refused(ValueError, f"{name}: {parameter} must be without padding"):
        function(model, {"input_ids": TOKENS, "attention_mask": 0 * mask})
    with refused(ValueError, f"{name}: {parameter} must be integers"):
        function(model, TOKENS + 0.5)


def test_tokens_may_be_texts(llama: Checkpoint) -> None:
    """Clean, corrupted and repeated ones; the last token is the target where there is no mask."""
    clean, corrupted = "def name(self):\n    return self.name", "def value(self):\n    return self.name"
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_path("llama"))
    ids = np.array([tokenizer(text)["input_ids"] for text in (clean, corrupted)])
    assert np.array_equal(run(llama, [clean, corrupted]).hidden, run(llama, ids).hidden)
    assert np.array_equal(freeze(llama, clean).embedding, freeze(llama, ids[0]).embedding)
    last = np.arange(ids.shape[1]) == ids.shape[1] - 1
    assert loss(llama, clean) == loss(llama, ids[0], last)
    of_texts = circuits.activation_patching(llama, clean, None, corrupted)
    assert np.array_equal(of_texts.recovered, circuits.activation_patching(llama, ids[0], last, ids[1]).recovered)
    texts, tokens = (circuits.Ablation("resample", corrupted=other) for other in (corrupted, ids[1]))
    effects = circuits.edge_effects(llama, clean, ablation=texts, n_measured=0)
    assert np.array_equal(effects.integrated, circuits.edge_effects(llama, ids[0], last, ablation=tokens).integrated)
    found = circuits.find_induction(llama, n=2, length=8, text=clean)
    assert np.array_equal(found.effect, circuits.find_induction(llama, n=2, length=8, text=ids[0]).effect)
    with refused(ValueError, "run: tokens must be texts of equally many tokens, got 1 to", "align them"):
        run(llama, [clean, "def"])


@pytest.fixture(scope="module")
def seen(model: Checkpoint) -> Forward:
    return run(model, TOKENS)


def refused_by(function: Callable[..., Any], kind: type[Exception], *words: str) -> Any:
    """The block raises as `refused` says, and names the function and its first parameter as its signature does."""
    parameter = next(iter(inspect.signature(function).parameters))
    return refused(kind, f"{function.__name__}: {parameter} must ", *words)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        *OF_ONE_STREAM,
        (functools.partial(circuits.find_circuit, loss_increase=1.0), (TOKENS, MASK)),
        (circuits.feed_forward_diagram, (0,)),
        (save_checkpoint, ("out",)),
        (read_weights, ()),
        (run, (TOKENS,)),
        (loss, (TOKENS, MASK)),
    ],
    ids=lambda value: None if isinstance(value, tuple) else getattr(value, "func", value).__name__,
)
def test_a_folder_is_no_checkpoint(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    named = function.func if isinstance(function, functools.partial) else function
    with refused_by(named, TypeError, "must be a Checkpoint", "PosixPath; pass open_checkpoint(folder)"):
        function(builtin_path(), *arguments)


@pytest.mark.parametrize("dtype", [int, "abc", np.float16, complex, ">f4"])
def test_a_precision_is_single_or_double(model: Checkpoint, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    monkeypatch.setattr(Checkpoint, "read", None)  # refused before any tensor is read
    for function in (circuits.find_induction, read_weights):
        with refused(ValueError, f"{function.__name__}: dtype must be float32 or float64, got {dtype!r}"):
            function(model, dtype=dtype)


def test_paths_are_tuples_of_heads(model: Checkpoint, seen: Forward) -> None:
    paths = circuits.Paths(freeze(model, [patterns[0] for patterns in seen.patterns]))
    for path in ((0, 3), 0, "0.3", ((0, 3, 1),)):
        with refused(TypeError, "path must be a tuple of heads"):
            paths[path]  # type: ignore[index]
    assert paths[((0, 3),)].ranks == (1,)
    for order in ("a", 1.5, np.ones(2)):
        with refused(TypeError, "Paths.count: order must be an integer"):
            paths.count(order)  # type: ignore[arg-type]
    with refused(ValueError, "Paths.count: order must be at least 0, got -1"):
        paths.count(-1)
    with refused(TypeError, "stream_by_order: max_order must be an integer"):
        circuits.stream_by_order(paths.stack, seen.residuals[0][0], max_order=np.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [3.0, lambda stream: stream, lambda stream: None])
def test_a_loss_returns_a_number(model: Checkpoint, seen: Forward, loss: Any) -> None:
    stack = freeze(model, [patterns[0] for patterns in seen.patterns])
    with refused(TypeError, "path_losses: loss must be a function", "number, got"):
        circuits.path_losses(stack, seen.residuals[0][0], loss)


def test_open_layers_are_of_an_attention_and_parts(model: Checkpoint, seen: Forward) -> None:
    parts = circuits.split_stream(model, TOKENS, layer=1)
    for attention, given in ((model, parts), (model.attention(1), seen.inputs[1][0])):
        with refused(TypeError, "OpenLayer: attention and parts must be"):
            circuits.OpenLayer(attention, given)  # type: ignore[arg-type]
    layer = circuits.OpenLayer(model.attention(1), parts)
    with refused(ValueError, "OpenLayer.pattern: scores must have shape (heads, n, n) = (4, 20, 20)"):
        layer.pattern(np.zeros((2, 3)))
    with refused(ValueError, "OpenLayer.output: pattern must have shape"):
        layer.output(pattern=np.zeros((4, 20, 19)))
    with refused(ValueError, "pair_effects: directions must have shape (64,)"):
        circuits.pair_effects(layer, "K", normal((3,)))
    with refused(ValueError, "pair_effects: position must lie between 0 and 19, got 20"):
        circuits.pair_effects(layer, "K", normal((64,)), position=20)
    with refused(TypeError, "pair_effects: layer must be an OpenLayer"):
        circuits.pair_effects(parts, "K", normal((64,)))  # type: ignore[arg-type]


def test_compositions_name_what_is_missing(model: Checkpoint) -> None:
    with refused(ValueError, "compositions: distance must be given"):
        circuits.compositions(open_checkpoint(builtin_path("llama")), "Q")
    found = circuits.compositions(model, "K")
    with refused(TypeError, "Compositions: pair must be two heads"):
        found[0]  # type: ignore[index]
    with refused(ValueError, "Compositions: head must lie between 0 and 3, got 9"):
        found[(0, 9), (1, 0)]
    assert found[(0, -1), (1, 0)] == found[(0, 3), (1, 0)]
    for pair in (((0, 1), (0, 2)), ((1, 0), (0, 3)), ((-1, 0), (1, 0))):
        with refused(ValueError, "Compositions: pair must be a head that writes and one of a later layer"):
            found[pair]
    for moments in (3, np.array(1.0)):
        with refused(TypeError, "compositions: moments must be a list of matrices"):
            circuits.compositions(model, "K", moments=moments)  # type: ignore[arg-type]
    with refused(TypeError, "stream_moments: forward must be a Forward", "run(model, tokens)"):
        circuits.stream_moments(model)  # type: ignore[arg-type]
    with refused(TypeError, "heat_map: compositions must be Compositions"):
        circuits.heat_map(model)  # type: ignore[arg-type]


def test_a_vocabulary_belongs_to_its_model(model: Checkpoint) -> None:
    other = circuits.read_vocabulary(open_checkpoint(builtin_path("llama")))
    for function, name in (
        (circuits.copying, "inputs"),
        (circuits.read_head, "inputs"),
        (circuits.score_shares, "vocabulary"),
    ):
        with refused(ValueError, f"{name} must have 64 features", "got 128"):
            function(model, 0, 0, **{name: other})
    with refused(TypeError, "weight_scores: vocabulary must be a Vocabulary, got int"):
        circuits.weight_scores(model, vocabulary=3)  # type: ignore[arg-type]
    with refused(ValueError, "copying: layer must lie between 0 and 1"):
        circuits.copying(model, 2, 0)
    with refused(ValueError, "k must be at least 1"):
        circuits.copying(model, 0, 0).accuracy(0)


def test_a_head_is_a_layer_and_a_number(model: Checkpoint) -> None:
    with refused(TypeError, "term_diagram: later must be a head"):
        circuits.term_diagram("K", model, model)  # type: ignore[arg-type]
    with refused(TypeError, "head_subspace: layer must be an Attention"):
        circuits.head_subspace(model, 0, "O")  # type: ignore[arg-type]


def test_parts_are_named_in_lists(model: Checkpoint) -> None:
    parts = circuits.split_stream(model, TOKENS, layer=1)
    for groups in (None, ["embedding"], "embedding"):
        with refused(TypeError, "StreamParts.merge: groups must be a dict"):
            parts.merge(groups)  # type: ignore[arg-type]
    for names in (None, "embedding", np.ones((2, 2)), [["embedding"]], [None]):
        with refused(TypeError, "StreamParts.merge: parts must be a list of names"):
            parts.merge({"all": names})  # type: ignore[dict-item]
    layer = circuits.OpenLayer(model.attention(1), parts)
    for given in (2.5, "embedding", np.ones((2, 2))):
        with refused(TypeError, "OpenLayer.scores: parts must be a list of names"):
            layer.scores(given)  # type: ignore[arg-type]
    with refused(TypeError, "StreamParts: parts must be a list of names"):
        parts[0]  # type: ignore[index]
    with refused(TypeError, "OpenLayer: softmax must be True or False"):
        circuits.OpenLayer(model.attention(1), parts, softmax=None)  # type: ignore[arg-type]


def test_the_largest_are_counted(model: Checkpoint, seen: Forward) -> None:
    found = {
        "Compositions": circuits.compositions(model, "K").largest,
        "Overlaps": circuits.subspace_overlaps(model, "O", "K").largest,
        "PatternScores": lambda n: circuits.pattern_scores(seen.patterns, TOKENS).largest("previous", n),
    }
    for name, largest in found.items():
        for n in ("a", None, 1.5):
            with refused(TypeError, f"{name}.largest: n must be an integer"):
                largest(n)  # type: ignore[operator]
        with refused(ValueError, f"{name}.largest: n must be at least 0, got -2"):
            largest(-2)  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [None, [], {}, np.ones((2, 2)), 3])
def test_a_choice_is_a_name(model: Checkpoint, seen: Forward, wrong: Any) -> None:
    heads = (model.attention(1), 0), (model.attention(0), 3)
    with refused(ValueError, "compositions: kind must be"):
        circuits.compositions(model, wrong)
    with refused(ValueError, "subspace_overlaps: side must be"):
        circuits.subspace_overlaps(model, "O", wrong)
    with refused(ValueError, "term_diagram: name must be one of"):
        circuits.term_diagram(wrong, *heads)
    with refused(ValueError, "PatternScores.largest: kind must be"):
        circuits.pattern_scores(seen.patterns, TOKENS).largest(wrong, 1)
    with refused(ValueError, "find_circuit: by must be"):
        circuits.find_circuit(model, TOKENS, MASK, loss_increase=1.0, by=wrong)
    with refused(ValueError, "TenTerms: name must be one of direct"):
        circuits.ten_terms(model, TOKENS)[wrong]


def test_what_is_centred_is_said_with_true_or_false(model: Checkpoint) -> None:
    ov = model.attention(0).ov(0)
    calls: dict[str, Callable[[Any], Any]] = {
        "composition_score": lambda flag: circuits.composition_score(ov, ov, centred=flag),
        "compositions": lambda flag: circuits.compositions(model, "V", centred=flag),
        "subspace_overlaps": lambda flag: circuits.subspace_overlaps(model, "O", "K", centred=flag),
    }
    for name, call in calls.items():
        for flag in ("yes", [], np.ones(2), 2):
            with refused(TypeError, f"{name}: centred must be True or False, got"):
                call(flag)


def test_patterns_are_a_list_of_layers() -> None:
    for patterns in (None, 3, "ab"):
        with refused(TypeError, "pattern_scores: patterns must be a list of arrays"):
            circuits.pattern_scores(patterns, TOKENS)  # type: ignore[arg-type]
    for weights in (np.array(1.0), None, "ab"):
        with refused(TypeError, "dense_diagram: weights must be a non-empty list"):
            circuits.dense_diagram(weights)  # type: ignore[arg-type]


def test_what_a_vocabulary_reads_has_its_width(model: Checkpoint) -> None:
    words = circuits.read_vocabulary(model)
    for read in (lambda columns: words.read(columns, None), lambda columns: words.read_by_source(columns, None)):
        for columns in (np.ones((64, 2)), np.ones(65), None, "a"):
            with refused((ValueError, TypeError), "columns must", "got"):  # type: ignore[arg-type]
                read(columns)
    for rows in (np.ones((2, 65)), np.ones(64), None):
        with refused((ValueError, TypeError), "Vocabulary.write: rows must", "got"):  # type: ignore[arg-type]
            words.write(rows)
    for token in (None, "a", 1.5):
        with refused(TypeError, "Vocabulary.name: token must be an integer"):
            words.name(token)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "arguments"),
    OF_ONE_STREAM,
    ids=lambda value: None if isinstance(value, tuple) else value.__name__,
)
def test_models_of_two_streams_are_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...], saved: Any
) -> None:
    pytest.importorskip("architecture_models")
    words = "must have one residual stream, got a t5 with an encoder and a decoder; pass its encoder alone"
    with refused_by(function, ArgumentError, words):
        function(open_checkpoint(saved("t5")[1]), *arguments)


def test_inspect_refuses_models_of_two_streams(saved: Any, tmp_path: Path) -> None:
    pytest.importorskip("architecture_models")
    with refused(ArgumentError, "inspect: source must have one residual stream, got a t5"):
        tnlib_adapters.inspect(saved("t5")[1], tmp_path / "out")


def test_cross_attention_is_not_split(saved: Any) -> None:
    pytest.importorskip("architecture_models")
    own, cross = (open_checkpoint(saved("t5")[1]).attention(layer) for layer in (2, 3))
    parts = circuits.StreamParts(("a", "b"), np.ones((2, 4, 24)))
    for name, call in (
        ("compositions", lambda: circuits.compositions([own, cross], "K")),
        ("OpenLayer", lambda: circuits.OpenLayer(cross, parts)),
    ):
        with refused(ArgumentError, f"{name}: attention must read one sequence, got cross-attention"):
            call()
    labels = [node.label for node in circuits.layer_diagram(cross).nodes]
    assert ("m" in labels, "x" in labels) == (True, True)
    assert "m" not in [node.label for node in circuits.layer_diagram(own).nodes]
