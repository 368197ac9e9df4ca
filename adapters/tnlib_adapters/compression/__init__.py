"""Attention weights to fewer numbers: factorise, share a budget out, write a checkpoint, report on it."""
