"""Difference of two checkpoints as a LoRA adapter."""
