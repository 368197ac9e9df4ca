"""Instrumented transformers models: hooks on modules, statistics over text, block-wise reconstruction."""

from tnlib_adapters._require_torch import require_torch

require_torch(__name__)
