"""Loops that numba compiles: no validation, no options, no classes. They are loaded for large arrays only."""
