"""Compressed folders in transformers: factored and dense are one model, which can be saved and loaded again."""
