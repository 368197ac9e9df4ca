"""Edges of indirect objects in SmolLM2 ranked by auto-circuit 1.0.1 and by tnlib, as circuits of every size.

    python -m benchmarks.attribution_peer [--count 4]

auto-circuit needs HookedTransformer, which TransformerLens 4 no longer has. A folder on the PYTHONPATH keeps it apart
from the environment (`pip install --no-deps --target FOLDER`): auto-circuit==1.0.1, transformer_lens==2.16.1, and
better_abc fancy_einsum beartype ordered-set blobfile lxml pycryptodomex word2word vscode-tqdm plotly narwhals.

Its integrated gradients take the gradient of the logit difference with respect to the masks of all edges, at six points
between the clean run and that with all edges from the corrupted prompt. Both rankings are measured by
`circuit_faithfulness` on the same 16 prompts, which the rankings have not seen.
"""

from __future__ import annotations

import time
from typing import Any

import click
import numpy as np
import torch
from tnlib_adapters.circuits import circuit_faithfulness, edge_effects

from benchmarks.circuit_faithfulness import indirect_objects, language_model, last
from benchmarks.smollm2 import smollm2_or_exit

SAMPLES = 5


def hooked_transformer() -> Any:
    """Return SmolLM2 as a HookedTransformer in single precision with one input for every edge."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_or_exit(), dtype=torch.float32)
    sizes = model.config
    config = HookedTransformerConfig(
        n_layers=sizes.num_hidden_layers,
        d_model=sizes.hidden_size,
        n_heads=sizes.num_attention_heads,
        n_key_value_heads=sizes.num_key_value_heads,
        d_head=sizes.hidden_size // sizes.num_attention_heads,
        rotary_dim=sizes.hidden_size // sizes.num_attention_heads,
        d_mlp=sizes.intermediate_size,
        d_vocab=sizes.vocab_size,
        n_ctx=64,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        final_rms=True,
        eps=sizes.rms_norm_eps,
        positional_embedding_type="rotary",
        rotary_base=sizes.rope_parameters["rope_theta"],
        rotary_adjacent_pairs=False,
        original_architecture="LlamaForCausalLM",
        default_prepend_bos=False,
        ungroup_grouped_query_attention=True,
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
        device="cpu",
    )
    hooked = HookedTransformer(config)
    hooked.load_state_dict(convert_llama_weights(model, config), strict=False)
    return hooked


def peer_effects(tokens: np.ndarray, corrupted: np.ndarray, others: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the scores of auto-circuit by edge, with its names of nodes replaced, to first order and integrated."""
    from auto_circuit.data import PromptDataLoader, PromptDataset
    from auto_circuit.prune_algos.mask_gradient import mask_gradient_prune_scores
    from auto_circuit.utils.graph_utils import patchable_model

    model = patchable_model(hooked_transformer(), factorized=True, slice_output="last_seq", separate_qkv=True)
    clean, corrupt = (list(torch.tensor(a[:, :-1])) for a in (tokens, corrupted))
    prompts = PromptDataset(clean, corrupt, list(torch.tensor(tokens[:, -1:])), list(torch.tensor(others[:, None])))
    loader = PromptDataLoader(prompts, seq_len=None, diverge_idx=0, batch_size=2, shuffle=False)
    found = {}
    for kind, options in (("first_order", {"mask_val": 0.0}), ("integrated", {"integrated_grad_samples": SAMPLES})):
        start = time.process_time()
        scores: Any = mask_gradient_prune_scores(model, loader, None, "logit", "avg_diff", **options)
        print(f"auto-circuit, {kind}: {time.process_time() - start:.0f} CPU s", flush=True)
        found[kind] = {renamed(edge.name): float(edge.prune_score(scores)) for edge in model.edges}
    return found


def renamed(edge: str) -> str:
    """Return an edge of auto-circuit, "MLP 0->A23.3.V", in the names of tnlib, "mlp 0 -> 23.3 V"."""
    writer, reader = edge.replace("Resid Start", "tokens").replace("Resid End", "logits").split("->")
    names = [name.removeprefix("A").replace("MLP", "mlp") for name in (writer, reader)]
    if names[1][-2:] in (".Q", ".K", ".V"):
        names[1] = f"{names[1][:-2]} {names[1][-1]}"
    return " -> ".join(names)


@click.command()
@click.option("--count", default=4, show_default=True, help="Number of prompts for the rankings.")
def main(count: int) -> None:
    """Print the faithfulness of circuits by both rankings."""
    weights, tokenizer = language_model()
    rng = np.random.default_rng(0)
    tokens, how = indirect_objects(tokenizer, count, rng)
    metric: Any = how.metric
    held_out, held_out_how = indirect_objects(tokenizer, 16, rng)
    start = time.process_time()
    effects = edge_effects(weights, tokens, last(tokens), ablation=how, n_measured=0)
    print(f"tnlib, both: {time.process_time() - start:.0f} CPU s", flush=True)
    own = {
        k: dict(zip(effects.names, getattr(effects, k).tolist(), strict=True)) for k in ("first_order", "integrated")
    }
    peer = peer_effects(tokens, np.asarray(how.corrupted), metric.others)
    for kind in ("first_order", "integrated"):
        for library, scores in (("tnlib", own), ("auto-circuit", peer)):
            found = circuit_faithfulness(weights, held_out, last(held_out), scores[kind], ablation=held_out_how)
            print(library, kind, found, flush=True)
        own_scores, peer_scores = (np.array([scores[kind][name] for name in effects.names]) for scores in (own, peer))
        print(f"{kind}: correlation of both {np.corrcoef(own_scores, peer_scores)[0, 1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
