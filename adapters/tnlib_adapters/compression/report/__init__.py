"""Compression report: data, HTML page and terminal output."""
