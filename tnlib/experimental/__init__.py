"""What is being tried out: names in here may change or go without notice. A table of contents, loaded when used."""

from __future__ import annotations

from tnlib._lazy import contents

_HOME = {
    "spectral_reduction": "tnlib.experimental.spectral_radius",
    "SpectralReduction": "tnlib.experimental.spectral_radius",
}

__getattr__, __dir__, __all__ = contents(__name__, _HOME)
