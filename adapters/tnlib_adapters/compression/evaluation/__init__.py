"""Errors of a compression: of operators, of outputs and on text."""
