"""A running model of transformers seen from inside: what its modules read and write, and probes of what it answers.

Every projection of the table of architectures is a module, so that forward hooks on modules suffice, whatever kernel
the model computes its attention with:

    q[t, h] = x[t] W_Q^h + b_Q^h          what the module of "q" writes, before any rotation
    y[t, h] = sum_u A^h[t, u] v[u, h]     what the module of "o" reads
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from tnlib_adapters.architectures.table import Architecture, find_row
from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
from tnlib_adapters.checkpoints.residual_stream import unembedding
from tnlib_adapters.factors.projections import Sizes, columns_of_head, read_sizes

_TOKENS = 1024  # of a batch: enough for products at full speed, and many batches of a short text
_LONGEST = 256  # tokens of a text

Key = TypeVar("Key")


@dataclass(frozen=True)
class Projection:
    """Where one projection of all its heads stands: columns (heads, d_head) of what a module writes, or reads ("o")."""

    module: nn.Module
    columns: Tensor
    name: str

    def written(self, x: Tensor) -> Tensor:
        """Return its part, (..., heads * d_head), of what the module writes: of "o", whose columns are read, all."""
        flat = self.columns.flatten()
        if self.name == "o" or (len(flat) == x.shape[-1] and bool((flat.diff() == 1).all())):
            return x
        return x[..., flat]


@dataclass(frozen=True)
class Layer:
    """One block of the model and the four projections of its attention."""

    block: nn.Module
    projections: dict[str, Projection]


@dataclass(frozen=True)
class Batch:
    """Texts as tokens: both of shape (texts, tokens), the mask 1 where there is a token."""

    ids: Tensor
    mask: Tensor

    @property
    def valid(self) -> Tensor:
        """The mask as booleans."""
        return self.mask.bool()

    @property
    def n_tokens(self) -> int:
        """Count of tokens that are part of a text."""
        return int(self.mask.sum())


@dataclass(frozen=True, repr=False)
class RunningModel:
    """A model of transformers in float32 with its tokenizer, and the modules of its attention."""

    model: Any
    tokenizer: Any
    row: Architecture
    sizes: Sizes
    layers: tuple[Layer, ...]

    @property
    def predicts(self) -> bool:
        """True of a model that predicts tokens, False of one that embeds texts."""
        return bool(self.row.unembed) and self.model.get_output_embeddings() is not None

    @property
    def longest(self) -> int:
        """The most tokens of one text."""
        config, row = self.model.config.to_dict(), self.row
        stated = row.get(config, row.context) if row.context else None
        first = row.first_position(config) if callable(row.first_position) else row.first_position
        return min(_LONGEST, (stated or _LONGEST) - first)

    def batches(self, text: str) -> list[Batch]:
        """Return a text as tokens: every line for itself where lines are embedded, windows of it where tokens are.

        Lines of similar length stand together; each is cut at `longest` tokens.
        """
        if self.predicts:
            whole = self.tokenizer(text, verbose=False)["input_ids"]
            ids = [whole[start : start + self.longest] for start in range(0, len(whole), self.longest)]
        else:
            lines = [line for line in text.splitlines() if line.strip()]
            ids = self.tokenizer(lines, truncation=True, max_length=self.longest)["input_ids"] if lines else []
        ids = sorted((one for one in ids if len(one) > 1), key=len)
        batches, start = [], 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or (end + 1 - start) * len(ids[end]) > _TOKENS:
                batches.append(_padded(ids[start:end], self.tokenizer.pad_token_id or 0))
                start = end
        return batches

    def __call__(self, batch: Batch) -> Tensor:
        """Return logits (texts, tokens, vocabulary), or one embedding of norm 1 for every text (texts, d_model)."""
        out = self.model(
            input_ids=batch.ids, attention_mask=batch.mask, **({"use_cache": False} if self.row.unembed else {})
        )
        return cast(Tensor, out.logits) if self.predicts else pooled(out.last_hidden_state, batch.mask)


def open_running(folder: str | os.PathLike[str]) -> RunningModel:
    """Load a checkpoint folder of a model of text, with its tokenizer, in transformers.

    Raises
    ------
    FileFormatError
        If the architecture is not known.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    import tnlib_adapters.transformers_plugin  # noqa: F401  registers the quantizer that loads compressed folders

    path = str(Path(folder))
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    # a folder without a head would get one at random
    loader: Any = AutoModel if unembedding(open_checkpoint(path)) is None else AutoModelForCausalLM
    model = loader.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval().requires_grad_(False)
    return running(model, tokenizer)


def running(model: Any, tokenizer: Any) -> RunningModel:
    """Find the attention of a model that is in memory."""
    config = model.config.to_dict()
    row = find_row(config, f"the config of {type(model).__name__}", "calibrate")
    sizes = read_sizes(row, config, f"the config of {type(model).__name__}", "calibrate")
    modules = dict(model.named_modules())
    layers = []
    for layer in range(sizes.n_layers):
        base = _in_memory(row, row.attention.format(layer=layer))
        name = next(name for name in modules if name == base or name.endswith(f".{base}"))
        block = name[: name.rindex(f".{layer}.") + len(f".{layer}")]
        found = {}
        for part, held in row.projections.items():
            for one in held:
                heads = range(0, sizes.n_heads, 1 if one in "qo" else sizes.n_heads // sizes.kv_heads)
                slices = [columns_of_head(row, sizes, held, one, head) for head in heads]
                columns = torch.tensor([range(s.start, s.stop) for s in slices])
                found[one] = Projection(modules[f"{name}.{_in_memory(row, part)}"], columns, one)
        layers.append(Layer(modules[block], found))
    return RunningModel(model, tokenizer, row, sizes, tuple(layers))


def find_module(model: nn.Module, name: str) -> nn.Module:
    """Return the module of this name, or of this name below the base model of one with a head."""
    found: nn.Module = next(m for path, m in model.named_modules() if path == name or path.endswith(f".{name}"))
    return found


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over tokens, of norm 1."""
    weights = mask[..., None].to(hidden.dtype)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def draw_probe(model: RunningModel, out: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
    """Return the gradient of one probe at the output, as `observe` draws them: of v . e it is v."""
    if not model.predicts:
        return torch.randn(out.shape, generator=generator)
    p = out.detach().softmax(-1)
    drawn = draw_tokens(p, generator)
    slope = p.neg_().scatter_add_(-1, drawn, torch.ones(drawn.shape))  # d log p[drawn] / d logits = 1[drawn] - p
    return slope.mul_(batch.mask[..., None])


def draw_tokens(p: Tensor, generator: torch.Generator) -> Tensor:
    """Return one index (..., 1) for every row of probabilities (..., vocabulary).

    One random number for every row, and where the sum of the row passes it: `torch.multinomial` draws as many as the
    row is long, which takes longer than a small model takes for its forward pass.
    """
    sums = p.cumsum(-1)
    at = torch.rand((*p.shape[:-1], 1), generator=generator) * sums[..., -1:]
    return torch.searchsorted(sums, at, right=True).clamp_(max=p.shape[-1] - 1)


def _padded(ids: Sequence[Sequence[int]], pad: int) -> Batch:
    longest = max(map(len, ids))
    tokens = torch.tensor([[*one, *[pad] * (longest - len(one))] for one in ids])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids])
    return Batch(tokens, mask)


def _in_memory(row: Architecture, name: str) -> str:
    for part, loaded in row.in_memory.items():
        name = name.replace(part, loaded)
    return name


@contextmanager
def start_of_gradients(block: nn.Module) -> Iterator[None]:
    """Let the stream in front of `block` be a leaf, so that gradients need no parameter."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0].detach().requires_grad_(), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"].detach().requires_grad_()}

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def output_of(module: nn.Module, into: dict[Key, Tensor], key: Key) -> Iterator[None]:
    """Keep what a module writes, whenever it runs inside the block, as into[key]."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> None:
        into[key] = out

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def input_of(module: nn.Module, into: dict[Key, Tensor], key: Key) -> Iterator[None]:
    """Keep what a module reads, whenever it runs inside the block, as into[key]."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        into[key] = args[0]

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
