"""Table of supported architectures: tensor names, storage layout and layer structure of each checkpoint family."""
