"""Checkpoint folders to named arrays: safetensors, sharded or not, read lazily with numpy alone."""
