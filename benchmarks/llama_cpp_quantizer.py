"""The quantizer of llama.cpp with an importance matrix, beside layout gguf at equal bits, for the built-in Llama.

    make engines        # once: installs llama-cpp-python
    python -m benchmarks.llama_cpp_quantizer [Q4_0 ...]

The importance matrix is the mean square of the inputs of every linear layer on `prose_calibration.txt`, on which tnlib
calibrates, without a fit and with two passes. Divergence is that of the predictions on `prose_held_out.txt` from those
of the original, in nats per token, by transformers. Prints a Markdown table.
"""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint
from tnlib_adapters.attention.softmax import log_softmax
from tnlib_adapters.compression.gguf_file import gguf_name, write_gguf

HERE = Path(__file__).parent
WINDOW = 256
TYPES = ("Q4_0", "IQ4_NL", "Q5_0", "Q8_0")  # with blocks of 32


def rounded_by_llama_cpp(source: Path, text: str, window: int, out: Path, ftype: str = "Q4_0") -> Path:
    """Write a Llama as a GGUF file of a type of `llama-quantize`, and return its path; an existing file is kept."""
    import llama_cpp

    if out.exists():
        return out
    whole = out.with_suffix(".float.gguf")
    write_gguf(open_checkpoint(source), whole)
    inputs = importance(source, text, window)
    data = (llama_cpp.llama_model_imatrix_data * (len(inputs) + 1))()  # the last one has no name
    for entry, (name, values) in zip(data, inputs.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{ftype}")
    parameters.nthread, parameters.imatrix = 2, data
    failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(out).encode(), ctypes.byref(parameters))
    whole.unlink()
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")
    return out


def importance(source: Path, text: str, window: int) -> dict[str, np.ndarray]:
    """Return the mean squares of the inputs of all linear layers by the name of the weight in GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(source)(text)["input_ids"])
    sums = dict[str, Any]()

    def observe(name: str) -> Any:
        def hook(_: Any, arguments: Any) -> None:
            sums[name] = sums.get(name, 0) + arguments[0].square().sum((0, 1))

        return hook

    for module, linear in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(linear, torch.nn.Linear):
            linear.register_forward_pre_hook(observe(gguf_name(f"{module}.weight") or ""))
    with torch.no_grad():
        for piece in tokens.split(window):
            model(piece[None])
    return {name: (total / len(tokens)).numpy().copy() for name, total in sums.items()}


def predictions(file: Path, text: str) -> np.ndarray:
    """Return the logarithms of the predicted probabilities (tokens, vocabulary) of a GGUF file on a text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(builtin_path("llama"))(text)["input_ids"])
    with torch.no_grad():
        return np.concatenate(
            [log_softmax(model(own[None]).logits[0].double().numpy()) for own in tokens.split(WINDOW)]
        )


def average_bits(file: Path) -> float:
    """Return the stored bits per number of the matrices of a GGUF file."""
    import gguf

    matrices = [tensor for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) > 1]
    return 8 * sum(int(own.n_bytes) for own in matrices) / sum(int(own.n_elements) for own in matrices)


@click.command()
@click.argument("types", nargs=-1)
def main(types: tuple[str, ...]) -> None:
    calibration, held_out = HERE / "prose_calibration.txt", (HERE / "prose_held_out.txt").read_text(encoding="utf-8")
    source, text = builtin_path("llama"), calibration.read_text(encoding="utf-8")
    print("| type | bits per parameter | llama.cpp | `--effort low` | `--effort default` |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_gguf(open_checkpoint(source), place / "whole.gguf")
        before = predictions(place / "whole.gguf", held_out)
        for ftype in types or TYPES:
            files = [rounded_by_llama_cpp(source, text, WINDOW, place / f"{ftype}.gguf", ftype)]
            bits = average_bits(files[0])
            for effort in ("low", "default"):
                out = place / f"{ftype}-{effort}"
                compress(source, out, Budget(bits=bits), calibration=calibration, layout="gguf", effort=effort)
                files.append(out / "model.gguf")
            losses = [float((np.exp(before) * (before - predictions(own, held_out))).sum(-1).mean()) for own in files]
            print(f"| {ftype} | {bits:.2f} | {' | '.join(f'{loss:.5f}' for loss in losses)} |", flush=True)


if __name__ == "__main__":
    main()
