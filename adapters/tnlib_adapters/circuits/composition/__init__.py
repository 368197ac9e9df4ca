"""Composition scores of pairs of heads: how strongly the later head reads the output of the earlier one."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
