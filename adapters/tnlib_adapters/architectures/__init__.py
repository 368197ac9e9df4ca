"""Table of architectures: how each family of checkpoints names, stores and wires its tensors."""
