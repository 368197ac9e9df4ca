"""A Llama of width 256, trained on English sentences of manuals: its matrices fill the super-blocks of K-quants.

    python -m benchmarks.wide_llama FOLDER

Its tokenizer is that of the built-in Llama. Training takes about ten minutes on one core.
"""

from __future__ import annotations

from pathlib import Path

import click
from tnlib_adapters import builtin_path

from benchmarks.texts import sentences

WINDOW, BATCH, STEPS, RATE = 128, 8, 800, 2e-3
N_SENTENCES, N_CALIBRATION, N_HELD_OUT = 12_000, 600, 300
SIZES = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 32, "num_hidden_layers": 3}


def texts() -> tuple[str, str]:
    """Return a text for training and calibration, and one that is held out."""
    drawn = sentences("manuals", N_SENTENCES)
    return "\n".join(drawn[N_HELD_OUT:]), "\n".join(drawn[:N_HELD_OUT])


def calibration_text() -> str:
    """Return the beginning of the text that the model was trained on."""
    return "\n".join(texts()[0].splitlines()[:N_CALIBRATION])


def wide_llama(folder: Path) -> Path:
    """Train the model and write it into a folder, unless it is there; return the folder."""
    import torch
    import transformers

    if folder.exists():
        return folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_path("llama"))
    tokens = torch.tensor(tokenizer(texts()[0], verbose=False)["input_ids"])
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(builtin_path("llama"), dtype="float32", **SIZES)
    model = transformers.LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, STEPS)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - WINDOW, (BATCH,)).tolist()
        batch = torch.stack([tokens[start : start + WINDOW] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"loss {loss.item():.2f} nats per token, {model.num_parameters():,} parameters")
    return folder


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    wide_llama(folder)


if __name__ == "__main__":
    main()
