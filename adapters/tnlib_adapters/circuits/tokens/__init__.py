"""Heads and residual streams in token space."""
