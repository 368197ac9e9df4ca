"""Tensor network diagrams, heat maps and interactive pictures of heads, layers and models."""
