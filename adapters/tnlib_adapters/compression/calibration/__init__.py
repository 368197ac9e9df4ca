"""Calibrated methods: whitening, ranks by the effect on the model output, rounding, block-wise reconstruction."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
