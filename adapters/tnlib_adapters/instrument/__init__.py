"""Running models of transformers: hooks on their modules, statistics over text, and layers fitted one by one."""

from tnlib_adapters._require_torch import require_torch

require_torch(__name__)
