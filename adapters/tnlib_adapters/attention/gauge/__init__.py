"""Gauge freedom of attention heads, and canonical forms of their weights."""
