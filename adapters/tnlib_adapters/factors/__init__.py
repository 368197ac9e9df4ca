"""Factored matrices in checkpoints: their names, descriptions, storage and expansion."""
