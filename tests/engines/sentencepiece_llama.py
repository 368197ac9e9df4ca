"""A small trained Llama with a SentencePiece tokenizer, which the converters of engines take whatever its words."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import torch
import transformers

VOCAB, CONTEXT, BATCH, STEPS = 512, 128, 8, 300


def train(folder: Path) -> None:
    """Train a Llama on docstrings of the standard library, save it, and save sentences of the text beside it."""
    import sentencepiece

    folder.mkdir(parents=True)
    text = folder.with_name("text.txt")
    lines = docstrings()
    text.write_text("\n".join(lines), encoding="utf-8")
    folder.with_name("calibration.txt").write_text("\n".join(lines[:400]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCAB,
        byte_fallback=True,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    transformers.LlamaTokenizer.from_pretrained(folder).save_pretrained(folder)
    trained(text, folder).save_pretrained(folder)


def docstrings() -> list[str]:
    """Return the lines of docstrings of modules of the standard library."""
    lines = list[str]()
    for name in ("argparse", "ast", "csv", "decimal", "difflib", "email.message", "fractions", "heapq", "inspect",
                 "json", "logging", "optparse", "pathlib", "pickle", "shutil", "socket", "ssl", "statistics",
                 "subprocess", "tarfile", "threading", "unittest.mock", "zipfile"):  # fmt: skip
        module = import_module(name)
        for owner in (module, *vars(module).values()):
            for part in (owner, *vars(owner).values()) if inspect.isclass(owner) else (owner,):
                lines += (inspect.getdoc(part) or "").splitlines() if callable(part) else []
    return sorted({line.strip() for line in lines if len(line.split()) > 4})


def trained(text: Path, folder: Path) -> transformers.LlamaForCausalLM:
    """Return a Llama trained on a text: a minute on one core."""
    import sentencepiece

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = torch.tensor(processor.encode(text.read_text(encoding="utf-8")))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,)).tolist()
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        optimiser.param_groups[0]["lr"] = 3e-3 * (1 - step / STEPS)
    return model.eval()
