"""Errors of compressed models, of their operators and on text, and baselines to compare them with."""
