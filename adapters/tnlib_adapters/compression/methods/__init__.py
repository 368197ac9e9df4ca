"""Factorisation methods: the components of every matrix, their sizes and errors."""
