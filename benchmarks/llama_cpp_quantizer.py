"""The quantizer of llama.cpp with an importance matrix, beside layout gguf at equal bits.

    make engines        # once: installs llama-cpp-python
    python -m benchmarks.llama_cpp_quantizer [--wide FOLDER] [--effort low ...] [Q4_0 ...]

The importance matrix is the mean square of the inputs of every linear layer on the text on which tnlib calibrates,
without a fit and with two passes. Divergence is that of the predictions on another text from those of the original, in
nats per token, by transformers. The model is the built-in Llama, whose matrices are held in blocks of 32, and the texts
are `prose_calibration.txt` and `prose_held_out.txt`; with --wide the model, in this folder, and the texts are those of
`benchmarks.wide_llama`, whose matrices fill super-blocks of 256. Prints a Markdown table.
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
from tnlib_adapters.compression.gguf_file import gguf_names, write_gguf

from benchmarks.wide_llama import calibration_text, texts, wide_llama

HERE = Path(__file__).parent
WINDOW = 256
TYPES = ("Q4_0", "IQ4_NL", "Q5_0", "Q8_0")  # with blocks of 32
K_TYPES = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q6_K")


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
    names, sums = gguf_names(open_checkpoint(source)), dict[str, Any]()

    def observe(name: str) -> Any:
        def hook(_: Any, arguments: Any) -> None:
            sums[name] = sums.get(name, 0) + arguments[0].square().sum((0, 1))

        return hook

    for module, linear in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(linear, torch.nn.Linear):
            linear.register_forward_pre_hook(observe(names[f"{module}.weight"] or ""))
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
@click.option("--wide", type=click.Path(path_type=Path))
@click.option("--effort", "efforts", multiple=True, default=("low", "default"))
def main(types: tuple[str, ...], wide: Path | None, efforts: tuple[str, ...]) -> None:
    if wide is None:
        source = builtin_path("llama")
        text, held_out = (
            (HERE / f"prose_{name}.txt").read_text(encoding="utf-8") for name in ("calibration", "held_out")
        )
    else:
        source, text, held_out = wide_llama(wide), calibration_text(), texts()[1]
    columns = " | ".join(f"`--effort {effort}`" for effort in efforts)
    print(f"| type | bits per parameter | llama.cpp | {columns} |\n|---|---|---|{'---|' * len(efforts)}")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        calibration = place / "calibration.txt"
        calibration.write_text(text, encoding="utf-8")
        write_gguf(open_checkpoint(source), place / "whole.gguf")
        before = predictions(place / "whole.gguf", held_out)
        for ftype in types or (TYPES if wide is None else K_TYPES):
            files = [rounded_by_llama_cpp(source, text, WINDOW, place / f"{ftype}.gguf", ftype)]
            bits = average_bits(files[0])
            for effort in efforts:
                out = place / f"{ftype}-{effort}"
                compress(source, out, Budget(bits=bits), calibration=calibration, layout="gguf", effort=effort)
                files.append(out / "model.gguf")
            losses = [float((np.exp(before) * (before - predictions(own, held_out))).sum(-1).mean()) for own in files]
            print(f"| {ftype} | {bits:.2f} | {' | '.join(f'{loss:.5f}' for loss in losses)} |", flush=True)


if __name__ == "__main__":
    main()
