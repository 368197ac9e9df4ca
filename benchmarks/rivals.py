"""Quantize the blocks of a Llama with a published library; run by `benchmarks.language_models` in its environment.

    python -P benchmarks/rivals.py NAME SOURCE IDS BITS OUT

NAME is one of `RIVALS`, IDS an .npy file of token ids (windows, tokens), and OUT a folder to make, dense or in the
format of GPTQ. Prints JSON: the version of the library, seconds of CPU, peak memory in MB, and the bits per weight.
Options are the defaults of the libraries: groups of 128 and symmetric ranges for GPTQ and AutoRound, groups of 64 with
zero points for HQQ, which reads no text. No module of tnlib is imported here: the libraries want other versions of its
dependencies.
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

RIVALS = ("gptqmodel", "auto-round", "auto-round-light", "hqq")
_AUTO_ROUND_STEPS = {"auto-round": 200, "auto-round-light": 50}  # of a block, in the recipes of these names


def quantize(name: str, source: Path, ids: Any, bits: int, out: Path) -> None:
    """Write the quantized model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    if name == "gptqmodel":
        from gptqmodel import GPTQModel, QuantizeConfig

        config = QuantizeConfig(bits=bits, group_size=128)
        model = GPTQModel.load(str(source), config, device="cpu", dtype=torch.float32)
        model.quantize([{"input_ids": own, "attention_mask": [1] * len(own)} for own in ids.tolist()], batch_size=4)
        model.save(str(out))
        return
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if name == "hqq":
        from hqq.core.quantize import Quantizer

        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                options = {"nbits": bits, "group_size": 64, "device": "cpu", "compute_dtype": torch.float32}
                module.weight.data = Quantizer.dequantize(*Quantizer.quantize(module.weight.data, **options))
    else:
        from auto_round import AutoRound

        batches = torch.utils.data.DataLoader(torch.from_numpy(ids), batch_size=8)
        rounding = AutoRound(
            model,
            tokenizer,
            bits=bits,
            group_size=128,
            sym=True,
            dataset=batches,
            nsamples=len(ids),
            seqlen=ids.shape[1],
            iters=_AUTO_ROUND_STEPS[name],
            device_map="cpu",
        )
        model, _ = rounding.quantize()
    model.float().save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Quantize by the arguments of the command line."""
    import numpy as np

    name, source, ids, bits, out = sys.argv[1:]
    start = time.process_time()
    quantize(name, Path(source), np.load(ids), int(bits), Path(out))
    run = {
        "version": importlib.metadata.version(name.removesuffix("-light")),
        "seconds": time.process_time() - start,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "bits": int(bits) + (32 / 64 if name == "hqq" else 16 / 128),  # with scales, and zero points, in 16 bits
    }
    print(json.dumps(run))


if __name__ == "__main__":
    main()
