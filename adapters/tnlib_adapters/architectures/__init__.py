"""Table of supported architectures, and the wiring of a model: the role of every tensor, from its row and config."""
