"""Kernels compiled by numba, without validation or options; loaded for large arrays only."""
