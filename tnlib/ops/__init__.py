"""Formats to formats."""
