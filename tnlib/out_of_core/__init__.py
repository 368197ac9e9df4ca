"""Decompositions of arrays that exceed memory: sources read by tiles, passes over them, and files in between."""
