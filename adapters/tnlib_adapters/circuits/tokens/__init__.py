"""Heads and streams in the space of tokens."""
