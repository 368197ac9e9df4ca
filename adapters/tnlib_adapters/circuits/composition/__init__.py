"""Composition of heads: scores with their chance level, and overlaps of subspaces."""
