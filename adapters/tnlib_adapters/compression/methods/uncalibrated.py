"""The attention of every layer, truncated as it is: no text is looked at."""

from __future__ import annotations

from tnlib_adapters.architectures.rope import read_frequencies
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.factorisation import Factorisation
from tnlib_adapters.compression.methods.table import METHODS, TURNED, UNPREDICTED
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import check_method, check_runs, check_uncompressed
from tnlib_adapters.compression.sizes import count_attention


def factorise(checkpoint: Checkpoint, method: str, progress: Progress = quiet) -> Factorisation:
    """Factorise the attention of every layer by a method of `METHODS`.

    Raises
    ------
    ArgumentError
        If the method is not known, this model cannot run it, or the checkpoint is already compressed.
    """
    check_method("compress", method)
    check_uncompressed("compress", checkpoint)
    check_runs("compress", checkpoint, method)
    make = (TURNED if turns(checkpoint) else METHODS)[method]
    layers = []
    for layer in range(checkpoint.n_layers):
        progress("factorising", layer, checkpoint.n_layers)
        layers.append(make(checkpoint.projections(layer), checkpoint.sizes))
    progress("factorising", checkpoint.n_layers, checkpoint.n_layers)
    return Factorisation(method, layers, sum(count_attention(checkpoint)), foretells=method not in UNPREDICTED)


def turns(checkpoint: Checkpoint) -> bool:
    """Whether anything but a product stands between queries and keys: rotary embeddings, or norms."""
    row = checkpoint.architecture
    frequencies = read_frequencies(row, checkpoint.config, checkpoint.sizes.d_head, None, "compress")
    return frequencies is not None or row.qk_norm is not None
