"""Small random models of transformers with a tokenizer of made-up words, as folders that know how to read text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

N_WORDS = 45
SPECIAL = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 49 words, [BOS] in front of every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: k for k, word in enumerate((*SPECIAL, *(f"w{k}" for k in range(N_WORDS))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 2)])
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def made_up_text(n_lines: int = 120, seed: int = 0) -> str:
    """Lines of 4 to 12 words, some words more common than others."""
    rng = np.random.default_rng(seed)
    common = 1.0 / np.arange(1, N_WORDS + 1)
    lines = [
        " ".join(f"w{k}" for k in rng.choice(N_WORDS, size=rng.integers(4, 13), p=common / common.sum()))
        for _ in range(n_lines)
    ]
    return "\n".join(lines) + "\n"


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
