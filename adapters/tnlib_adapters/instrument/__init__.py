"""Instrumented transformers models: hooks on modules, statistics over text, fits of blocks and of the model."""

from tnlib._validate import import_optional

import_optional("running a model on a text", "torch", "'tnlib[torch]'")
import_optional("running a model on a text", "transformers", "'tnlib[torch]'")
