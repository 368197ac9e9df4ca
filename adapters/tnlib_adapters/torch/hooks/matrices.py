"""What any linear module of a running model reads, and gradients at what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tnlib._typing import Array
from tnlib_adapters.torch.hooks.running import Batch, RunningModel, draw_probe, input_of


def find_module(model: nn.Module, name: str) -> nn.Module:
    """Return the module of this name, or of this name below the base model of one with a head."""
    found: nn.Module = next(m for path, m in model.named_modules() if path == name or path.endswith(f".{name}"))
    return found


def observe_modules(
    model: RunningModel, names: Sequence[str], batch: Batch, n_probes: int, generator: torch.Generator
) -> Iterator[tuple[Array, Array]]:
    """Run one batch; yield for every module what it reads (texts, tokens, in), and gradients (probes, the same, out).

    Entries beyond the end of a text are 0. An embedding reads ids, for which an empty array stands.
    """
    modules = [find_module(model.model, name) for name in names]
    with ExitStack() as hooks:
        read: dict[int, Tensor] = {}
        wrote: dict[int, Tensor] = {}
        for k, module in enumerate(modules):
            hooks.enter_context(input_of(module, read, k))
            hooks.enter_context(_leaf_at(module, wrote, k))
        with torch.enable_grad():
            out = model(batch)
            tensors = [wrote[k] for k in range(len(modules))]
            found = []
            for one in range(n_probes):
                slope = draw_probe(model, out, batch, generator)
                found.append(torch.autograd.grad(out, tensors, slope, retain_graph=one + 1 < n_probes))
    valid = batch.mask[..., None]
    for k in range(len(modules)):
        x = read[k].detach()
        slopes = torch.stack([grads[k] for grads in found]) * valid
        yield (x * valid).numpy() if x.is_floating_point() else torch.zeros(0).numpy(), slopes.numpy()


@contextmanager
def _leaf_at(module: nn.Module, into: dict[int, Tensor], key: int) -> Iterator[None]:
    """Keep what a module writes as into[key]; where nothing before it needs a gradient, one starts there."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        into[key] = out if out.requires_grad else out.detach().requires_grad_()
        return into[key]

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
