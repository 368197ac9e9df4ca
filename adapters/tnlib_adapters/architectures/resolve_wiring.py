"""Resolve the wiring of a model from its architecture row, its config and the names of its tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from tnlib import FileFormatError
from tnlib_adapters.architectures.architecture import (
    Architecture,
    Decoder,
    Experts,
    Latent,
    Mlp,
    RelativeBiasKeys,
    Routing,
    Settings,
    by_config,
)
from tnlib_adapters.architectures.architecture import names as alternatives
from tnlib_adapters.architectures.config_keys import Config, read_settings
from tnlib_adapters.architectures.grouped_heads import Sizes, read_sizes
from tnlib_adapters.architectures.rope_scaling import read_frequencies
from tnlib_adapters.architectures.table import find_row
from tnlib_adapters.architectures.wiring import (
    AttentionWiring,
    EmbeddingWiring,
    EncoderWiring,
    ExpertsWiring,
    FeedForwardWiring,
    LatentWiring,
    LayerWiring,
    Linear,
    NormWiring,
    RelativeBiasWiring,
    UnembeddingWiring,
    Wiring,
)

Stored = Literal["out_in", "in_out"]
Place = Literal["pre", "post", "output", "final", "head", "latent"]

# Older parameter names, still used by a few checkpoints such as bert-base-uncased, come second.
_WEIGHT_OF_NORM = ("weight", "gamma")
_BIAS_OF_NORM = ("bias", "beta")


def wire(
    config: Config,
    tensors: Collection[str],
    *,
    where: str,
    function: str,
    prefix: str | None = None,
    loaded: bool = False,
) -> Wiring:
    """Return the wiring of a model.

    Parameters
    ----------
    config
        Content of config.json.
    tensors
        Names of all tensors.
    where, function
        Place of the config and calling function, for messages.
    prefix
        Prefix of the names; None: the one under which the embedding is found.
    loaded
        Names are those of a loaded transformers model.

    Raises
    ------
    FileFormatError
        If the architecture is unknown, a value of the config has another type or lies outside its range, sizes
        contradict each other, or there is no embedding.
    """
    row = find_row(config, where, function)
    settings = read_settings(row, config, where, function)
    sizes = read_sizes(row, settings, where, function)
    prefix = _find_prefix(row, tensors, where, function) if prefix is None else prefix
    resolver = _Resolver(row, settings, sizes, tensors, prefix, loaded, where, function)
    if tensors and sizes.n_layers > len(tensors):  # before anything is made for each of many layers
        weights = (linear.weight for k in range(sizes.n_layers) for linear in resolver.projections(k).values())
        missing = next(name for name in weights if name not in tensors)
        raise FileFormatError(
            f"{function}: tensor {missing!r} is missing beside {where}; config.json states more layers than there "
            "are, or the download is incomplete."
        )
    if tensors and row.experts is not None and not loaded:
        n_experts = settings[row.experts.n_experts]
        total = n_experts * sum(row.experts.in_layer(settings, k) for k in range(sizes.n_layers))
        if total > len(tensors):
            raise FileFormatError(
                f"{function}: {row.experts.n_experts} in {where} must not exceed the number of tensors, got "
                f"{n_experts} per layer, {total} in total, for {len(tensors)}; repair it, or complete the download."
            )
    return resolver.wiring()


def _find_prefix(row: Architecture, tensors: Collection[str], where: str, function: str) -> str:
    # embeddings: every checkpoint of the architecture has them, a compressed one too
    probes = [f"{prefix}{row.embeddings[0]}.weight" for prefix in row.prefixes]
    for prefix, probe in zip(row.prefixes, probes, strict=True):
        if probe in tensors:
            return prefix
    raise FileFormatError(
        f"{function}: a {row.model_type} must hold tensor {probes[0]!r}, found none of that name beside {where}; "
        "check that config.json belongs to these weights."
    )


@dataclass(frozen=True)
class _Resolver:
    row: Architecture
    settings: Settings
    sizes: Sizes
    tensors: Collection[str]
    prefix: str
    loaded: bool
    where: str
    function: str

    def wiring(self) -> Wiring:
        """Return the wiring of the model."""
        row, last = self.row, self  # the stack that ends in the unembedding
        decoder = row.decoder if row.decoder is not None and self.settings["is_encoder_decoder"] else None
        if decoder is None:
            layers = self.layers(self.sizes.n_layers)
        else:
            n_encoder, last = self.settings[row.n_layers], replace(self, row=decoder.stack)
            encoder = EncoderWiring(n_encoder, self.norm(by_config(row.final_norm, self.settings), "pre"))
            decoder_layers = last.decoder_layers(decoder, encoder, (self.sizes.n_layers - n_encoder) // 2)
            layers = (*self.layers(n_encoder), *decoder_layers)
        unembedding = last.unembedding(None if decoder is None else decoder.scaled_logits)
        return Wiring(
            architecture=row,
            reads=row.reads,
            prefix=self.prefix,
            sizes=self.sizes,
            embedding=self.embedding(),
            layers=layers,
            final_norm=self.norm(by_config(last.row.final_norm, self.settings), "pre" if unembedding else "final"),
            unembedding=unembedding,
            masked_head=self.masked_head(),
            in_memory=row.in_memory,
        )

    def masked_head(self) -> str | None:
        """Return the head that predicts masked tokens, None if it is not stored."""
        head = self.row.masked_head
        return head if head is not None and any(name.startswith(f"{head}.") for name in self.tensors) else None

    # -------------------------------------------------------------------------------------------------- names

    def tensor(self, name: str) -> str | None:
        """Return the full name of a tensor, None if it is missing; heads often stand outside the prefix."""
        full = self.prefix + name
        return full if full in self.tensors else name if name in self.tensors else None

    def required(self, name: str) -> str:
        """Return the full name of a tensor, also if it is missing."""
        return self.tensor(name) or self.prefix + name

    def module(self, pattern: str, layer: int | None = None, expert: int | None = None) -> str:
        """Return the name of a module without the prefix."""
        name = pattern.format(layer=layer, expert=expert)
        for part, in_memory in self.row.in_memory.items() if self.loaded else ():
            name = name.replace(part, in_memory)
        return name

    def linear(self, pattern: str, stored: Stored, layer: int | None = None, expert: int | None = None) -> Linear:
        """Return an affine map, also if it is missing."""
        name = self.module(pattern, layer, expert)
        return Linear(name, self.required(f"{name}.weight"), self.tensor(f"{name}.bias"), stored)

    def linear_if_stored(self, pattern: str | None) -> Linear | None:
        """Return a map (out, in), None if it is not stored."""
        stored = pattern is not None and self.tensor(f"{self.module(pattern)}.weight")
        return self.linear(pattern, "out_in") if pattern is not None and stored else None

    def norm(self, pattern: str | tuple[str, ...] | None, place: Place, layer: int | None = None) -> NormWiring | None:
        """Return the first of these norms that is stored, the last if none is; None for None."""
        return None if pattern is None else self.named_norm(pattern, place, layer)

    def named_norm(self, pattern: str | tuple[str, ...], place: Place, layer: int | None) -> NormWiring:
        """Return the first of these norms that is stored, the last if none is."""
        row, candidates = self.row, [self.module(name, layer) for name in alternatives(pattern)]
        name = next((name for name in candidates if self.part_of_norm(name, _WEIGHT_OF_NORM)), candidates[-1])
        centres = row.norm == "layer" and place not in ("head", "latent")
        return NormWiring(
            name=name,
            weight=self.part_of_norm(name, _WEIGHT_OF_NORM) or self.required(f"{name}.weight"),
            bias=self.part_of_norm(name, _BIAS_OF_NORM) if centres else None,
            kind="layer" if centres else "rms",
            offset=1.0 if row.norm == "rms + 1" else 0.0,
            place=place,
            eps=None if row.norm_eps is None else self.settings[row.norm_eps],
            eps_key=row.norm_eps,
        )

    def part_of_norm(self, name: str, parts: tuple[str, str]) -> str | None:
        """Return the tensor of a norm under the first of these names, None if it is missing."""
        return next((full for part in parts if (full := self.tensor(f"{name}.{part}"))), None)

    # ------------------------------------------------------------------------------ embedding and unembedding

    def embedding(self) -> EmbeddingWiring:
        """Return the embedding of tokens or patches."""
        row, images = self.row, self.row.reads == "images"
        tokens, *others = row.embeddings
        parent = tokens.split(".")[0]
        learned = [f"{parent}.position_embeddings"] if images else [f"{name}.weight" for name in others]
        positions, segments, *_ = [*map(self.required, learned), None, None]
        first = by_config(row.first_position, self.settings)
        context = None if row.context is None else self.settings[row.context]
        if context is not None and first >= context:
            raise FileFormatError(
                f"{self.function}: {row.context} in {self.where} must exceed the number of the first position, "
                f"{first}, got {context}; repair it."
            )
        return EmbeddingWiring(
            table=self.linear(tokens, "out_in" if images else "in_out"),
            positions=positions,
            segments=segments,
            class_token=self.required(f"{parent}.cls_token") if images else None,
            widen=self.linear_if_stored(row.narrow and row.narrow[0]),
            scale=math.sqrt(self.sizes.d_model) if row.embedding_scale else 1.0,
            first_position=first,
            padding=None if row.padding is None else self.settings[row.padding],
            norm=self.norm(row.embedding_norm, "post"),
            shared=row.embedding_shared,
        )

    def unembedding(self, scaled_logits: str | None) -> UnembeddingWiring | None:
        """Return the unembedding, None for a model that ends in hidden states; `scaled_logits` is a config key."""
        row, table = self.row, self.row.embeddings[0]
        name = next((name for name in row.unembed if self.tensor(f"{name}.weight")), None)
        tied = table in row.unembed and self.settings["tie_word_embeddings"]
        if name is None or (name == table and not tied):
            return None
        stated = None if scaled_logits is None else self.settings[scaled_logits]
        is_scaled = scaled_logits is not None and (tied if stated is None else stated)
        return UnembeddingWiring(
            linear=self.linear(name, "out_in"),
            tied=tied,
            shared=name == table,
            own_weight=f"{row.unembed[0]}.weight",
            narrow=self.linear_if_stored(row.narrow and row.narrow[1]),
            logit_cap=None if row.logit_cap is None else self.settings[row.logit_cap],
            scale=1 / math.sqrt(self.sizes.d_model) if is_scaled else 1.0,
        )

    # ------------------------------------------------------------------------------------------------- layers

    def layers(self, n: int) -> tuple[LayerWiring, ...]:
        """Return the layers of a stack of `n` blocks."""
        return tuple(self.layer(k) for k in range(n))

    def decoder_layers(self, decoder: Decoder, encoder: EncoderWiring, n: int) -> tuple[LayerWiring, ...]:
        """Return the layers of a decoder of `n` blocks, two of each."""
        blocks = self.layers(n)
        attentions = (replace(block, feed_forward=None, experts=None) for block in blocks)
        attention = (self.cross_attention(decoder, encoder, k) for k in range(n))
        crossed = (replace(block, attention=cross) for block, cross in zip(blocks, attention, strict=True))
        return tuple(layer for pair in zip(attentions, crossed, strict=True) for layer in pair)

    def layer(self, k: int) -> LayerWiring:
        """Return layer k."""
        row = self.row
        experts = None if row.experts is None or not row.experts.in_layer(self.settings, k) else row.experts
        mlp = by_config(row.mlp, self.settings)
        before, number, _ = row.attention.partition("{layer}")
        return LayerWiring(
            module=self.prefix + self.module(before + number, k),
            attention=self.attention(k),
            feed_forward=None if mlp is None or experts else self.feed_forward(mlp, k, *self.norms(mlp, k)),
            experts=None if experts is None else self.experts(experts, k),
            parallel=bool(by_config(row.parallel, self.settings)),
        )

    def sublayer_norm(self, pattern: str | tuple[str, ...] | None, k: int) -> NormWiring | None:
        """Return the pre-norm or post-norm of a sublayer."""
        place = by_config(self.row.norm_place, self.settings)
        return None if place is None else self.norm(pattern, "pre" if place == "before" else "post", k)

    def projections(self, k: int) -> dict[str, Linear]:
        """Return the modules of the attention by the projections that they hold."""
        row = self.row
        return {
            letters: self.linear(f"{row.attention}.{name}", row.stored, k) for name, letters in row.projections.items()
        }

    def attention(self, k: int) -> AttentionWiring:
        """Return the attention of layer k."""
        row, settings, sizes = self.row, self.settings, self.sizes
        return AttentionWiring(
            sizes=sizes,
            parent=self.prefix + self.module(row.attention, k),
            projections=self.projections(k),
            latent=None if row.latent is None else self.latent(row.latent, k),
            fused=row.fused,
            norm=self.sublayer_norm(row.attention_norm, k),
            output_norm=self.norm(row.attention_norm_after, "output", k),
            head_norms=tuple(
                norm for name in row.qk_norm or () if (norm := self.norm(f"{row.attention}.{name}", "head", k))
            ),
            scale=row.scale(settings, k, sizes.d_head),
            softcap=None if row.softcap is None else settings[row.softcap],
            causal=row.causal,
            encoder=None,
            window=None if row.window is None else row.window(settings, k),
            alibi=None if row.alibi is None else row.alibi(settings, sizes.n_heads, sizes.d_head),
            relative_bias=None if row.relative_bias is None else self.relative_bias(row.relative_bias),
            context=settings[row.context] if row.context else None,
            pairs=row.rope is not None and by_config(row.rope.layout, settings) == "pairs",
            frequencies=functools.partial(read_frequencies, row, settings, sizes.d_head, layer=k),
        )

    def cross_attention(self, decoder: Decoder, encoder: EncoderWiring, k: int) -> AttentionWiring:
        """Return the attention of block k of a decoder to the output of its encoder."""
        row = replace(self.row, attention=decoder.cross_attention, attention_norm=decoder.cross_norm)
        of_cross = replace(self, row=row)
        return replace(of_cross.attention(k), causal=False, relative_bias=None, encoder=encoder)

    def relative_bias(self, bias: RelativeBiasKeys) -> RelativeBiasWiring:
        """Return the relative bias of all layers."""
        n_bins, max_distance = self.settings[bias.n_bins], self.settings[bias.max_distance]
        times = 2 if self.row.causal else 4  # a decoder has all bins on one side
        if n_bins % 4 or n_bins >= times * max_distance:
            raise FileFormatError(
                f"{self.function}: {bias.n_bins} in {self.where} must be a multiple of 4 and less than "
                f"{'twice' if self.row.causal else 'four times'} {bias.max_distance}, got {n_bins!r} and "
                f"{max_distance!r}; repair it."
            )
        return RelativeBiasWiring(self.linear(bias.table, "in_out"), n_bins, max_distance)

    def latent(self, latent: Latent, k: int) -> LatentWiring:
        """Return the maps to and from the latent vectors of layer k."""
        query_rank, rank = self.settings[latent.query_rank], self.settings[latent.rank]
        names = (latent.query_down, latent.query_up if query_rank else latent.query, latent.down, latent.up)
        parent, stored = self.row.attention, self.row.stored
        query_down, query_up, down, up = (self.linear(f"{parent}.{name}", stored, k) for name in names)
        query_norm, norm = (
            replace(self.named_norm(f"{parent}.{name}", "latent", k), eps=latent.eps, eps_key=None)
            for name in (latent.query_norm, latent.norm)
        )
        return LatentWiring(
            query_down=query_down if query_rank else None,
            query_norm=query_norm if query_rank else None,
            query_up=query_up,
            down=down,
            norm=norm,
            up=up,
            query_rank=query_rank,
            rank=rank,
            n_rotated=self.settings[latent.d_rotated],
        )

    def experts(self, experts: Experts, k: int) -> ExpertsWiring:
        """Return the experts of layer k."""
        n, n_chosen = self.settings[experts.n_experts], self.settings[experts.n_chosen]
        if n_chosen is None or n_chosen > n:
            raise FileFormatError(
                f"{self.function}: {experts.n_chosen} in {self.where} must not exceed the number of experts, "
                f"{experts.n_experts}, got {n_chosen} of {n}; repair it."
            )
        routing = self.routing(experts.routing(self.settings), n, n_chosen)  # before anything is made for each expert
        norms = self.norms(experts.expert, k)
        return ExpertsWiring(
            router=self.linear(experts.router, self.row.stored, k),
            experts=tuple(self.feed_forward(experts.expert, k, *norms, expert) for expert in range(n)),
            n_chosen=n_chosen,
            routing=routing,
            correction=None if experts.correction is None else self.required(self.module(experts.correction, k)),
            shared=None if experts.shared is None else self.feed_forward(experts.shared, k, *norms),
        )

    def routing(self, routing: Routing, n: int, n_chosen: int) -> Routing:
        """Return the routing among `n` experts, checked."""
        n_groups, kept = routing.n_groups, routing.n_chosen_groups
        counts = None not in (n_groups, kept) and kept <= n_groups <= n
        if not counts or n % n_groups or n // n_groups < routing.n_best or n_chosen > kept * (n // n_groups):
            raise FileFormatError(
                f"{self.function}: the {n} experts in {self.where} must form groups of equal size, of at least "
                f"{routing.n_best}, that are enough to choose {n_chosen} from, got {kept!r} of {n_groups!r} groups; "
                "repair it."
            )
        return routing

    def norms(self, mlp: Mlp, k: int) -> tuple[NormWiring | None, NormWiring | None]:
        """Return the norm and the output norm of the feed-forward layer, or the experts, of layer k."""
        return self.sublayer_norm(mlp.norm, k), self.norm(mlp.norm_after, "output", k)

    def feed_forward(
        self, mlp: Mlp, k: int, norm: NormWiring | None, output_norm: NormWiring | None, expert: int | None = None
    ) -> FeedForwardWiring:
        """Return the feed-forward layer of layer k, or one of its experts."""
        return FeedForwardWiring(
            up=self.linear(mlp.up, self.row.stored, k, expert),
            down=self.linear(mlp.down, self.row.stored, k, expert),
            gate=None if mlp.gate is None else self.linear(mlp.gate, self.row.stored, k, expert),
            activation=self.settings[mlp.activation],
            activation_key=mlp.activation,
            norm=norm,
            output_norm=output_norm,
        )
