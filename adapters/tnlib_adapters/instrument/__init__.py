"""Instrumented transformers models: hooks on modules, statistics over text, block-wise reconstruction."""

from tnlib._validate import import_optional

import_optional(__name__, "torch", "'tnlib[torch]'")
import_optional(__name__, "transformers", "'tnlib[torch]'")
