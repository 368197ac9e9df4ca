"""Checkpoint folders as files: safetensors, sharded or not, read lazily, and folders written whole or not at all."""
