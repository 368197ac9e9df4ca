"""Layouts that store a compressed model as a smaller model of an architecture that transformers knows."""
