"""Tensor formats, one folder each with its algorithms."""
