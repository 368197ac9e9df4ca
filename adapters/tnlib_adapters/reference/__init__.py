"""Operators to a running model: a float64 numpy pass driven by the table of architectures."""
