"""Verbs by registration: base classes, references by name, messages that list the formats of a verb."""

from __future__ import annotations

import subprocess
import sys
from inspect import isabstract

import oracles

import tnlib
from tnlib import _registry
from tnlib._format import Format

# The formats of every verb: a new one is added here and in one folder.
TRAINS, ALL = "TensorTrain, TTMatrix", "TensorTrain, TTMatrix, Tucker, CP, SVD, LowRank or KroneckerTerms"
FORMATS = {
    "round": f"{TRAINS}, Tucker, SVD, LowRank or KroneckerTerms",
    "inner": f"{TRAINS}, Tucker, CP, LowRank or KroneckerTerms",
    "kron": ALL,
    "outer": "TensorTrain, Tucker, CP, SVD or LowRank",
    "canonical_form": f"{TRAINS}, Tucker, CP, SVD or LowRank",
    "contract_vectors": "TensorTrain, Tucker or CP",
    "schmidt_values": "KroneckerTerms",
    "ttm_svd": "KroneckerTerms",
    "to_TTMatrix": "TensorTrain or KroneckerTerms",
    "to_LowRank": "TensorTrain, Tucker, CP or SVD",
}


def test_every_verb_lists_its_formats() -> None:
    code = f"from tnlib._registry import list_formats; print([list_formats(v) for v in {list(FORMATS)}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str([f"a {names}" for names in FORMATS.values()])


def test_every_reference_resolves() -> None:
    kinds = {getattr(tnlib, name) for name in tnlib.__all__}
    kinds = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Format) and not isabstract(kind)}
    conversions = [f"to_{kind.__name__}" for kind in kinds]
    for kind in kinds:
        for verb in (*FORMATS, "entries", "diagram", *conversions):
            implementation = _registry.implementation(verb, kind)  # imports it
            assert implementation is None or callable(implementation), (kind, verb)
        assert _registry.implementation("diagram", kind)
        assert _registry.format_class(kind.__name__) is kind


class Base:
    """Has one verb."""


class Derived(Base):
    """Has another."""


def test_a_class_has_the_verbs_of_its_bases() -> None:
    _registry.register(Base, to_First=abs)
    _registry.register(Derived, to_Second=len)
    assert _registry.implementation("to_First", Derived) is abs
    assert _registry.implementation("to_Second", Derived) is len
    assert _registry.implementation("to_Second", Base) is None
    _registry.register(Derived, to_First=len)  # known to be another one before
    assert _registry.implementation("to_First", Derived) is len
    assert _registry.implementation("to_First", Base) is abs
    assert _registry.format_class("Derived") is Derived
    assert _registry.format_class("NoSuchFormat") is None
    assert _registry.list_formats("to_First") == "a Base or Derived"
    assert _registry.list_formats("no such verb") == "a format"


def test_names_of_classes_are_taken_once() -> None:
    cls = type("TensorTrain", (), {"__module__": "elsewhere"})
    with oracles.refused(ValueError, "register: kind must have a name of its own", "TensorTrain"):
        _registry.register(cls)
    with oracles.refused(TypeError, "register: kind must be a class", "3"):
        _registry.register(3)  # type: ignore[arg-type]
    with oracles.refused(ValueError, "register: a verb must be to_<Class> or one of canonical_form", "got rnd"):
        _registry.register(Base, rnd=abs)


def test_a_class_that_is_defined_again_takes_the_place_of_the_first() -> None:
    for _ in range(2):
        cls = type("DefinedTwice", (), {"__module__": "elsewhere"})
        _registry.register(cls)
        assert _registry.format_class("DefinedTwice") is cls
