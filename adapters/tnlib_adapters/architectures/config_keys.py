"""Keys of config.json: type, range and default of each, and their typed reading.

`read_settings` checks every key that a row of the architecture table reads, before anything is allocated; no other code
reads config.json, apart from the section on factored matrices (`factors/config_section.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any, Literal, NoReturn

from tnlib import FileFormatError
from tnlib_adapters.architectures.architecture import Architecture, Settings

Config = Mapping[str, Any]  # content of config.json, or that of a loaded model

LAYER_TYPES = ("full_attention", "sliding_attention")
# Alternative keys for the same value, of different transformers versions.
SYNONYMS = (
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_embd", "hidden_size", "n_embed"),
    ("n_positions", "max_position_embeddings"),
    ("num_kv_heads", "num_key_value_heads"),
    ("num_local_experts", "num_experts"),
    ("rope_parameters", "rope_scaling"),
)
_ROPE_SECTION = "rope_parameters"


@dataclass(frozen=True)
class Key:
    """Type and range of a config value, and its default; a row of the architecture table may have another default."""

    expected: str  # for messages
    accepts: Callable[[Any], bool]
    default: Any = None
    is_required: bool = False
    null: Literal["default", "value", "refused"] = "default"  # meaning of null: as if missing, or a value of its own
    convert: Callable[[Any], Any] = lambda value: value


def _integer(low: int, high: int, **options: Any) -> Key:
    return Key(
        f"an integer from {low:,} to {high:,}", lambda value: type(value) is int and low <= value <= high, **options
    )


def _is_number(value: Any, low: float, high: float) -> bool:
    # a finite range also excludes NaN and the integers that no float can hold
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _number(low: float, high: float, **options: Any) -> Key:
    return Key(
        f"a number from {low:g} to {high:g}", lambda value: _is_number(value, low, high), convert=float, **options
    )


def _flag(*, default: bool) -> Key:
    # null counts as false in transformers, which is the default or no known configuration
    return Key("true or false", lambda value: type(value) is bool, default, null="refused" if default else "default")


def _list(expected: str, accepts: Callable[[Any], bool], *, at_least: int = 0) -> Key:
    return Key(
        f"a list of {expected}",
        lambda value: isinstance(value, list | tuple) and len(value) >= at_least and all(map(accepts, value)),
    )


_TEXT = Key("a string", lambda value: isinstance(value, str))
# Upper bounds lie far above those of any model, and low enough for lists of one entry per layer, head or expert.
_COUNT, _REQUIRED_COUNT = (_integer(1, 2**16, is_required=required) for required in (False, True))
_WIDTH, _REQUIRED_WIDTH = (_integer(1, 2**24, is_required=required) for required in (False, True))
_POSITIONS = _integer(1, 2**31 - 1)
_EPS = _number(1e-30, 1.0)
_BASE = _number(1.0 + 1e-6, 1e30, default=10000.0)  # YaRN divides by its logarithm
_POSITIVE = _number(1e-6, 1e6)
_WEIGHT = _number(0.0, 1e6)
_FRACTION = _number(1e-6, 1.0)
_FACTORS = _list("numbers from 1e-06 to 1e+06", lambda value: _is_number(value, 1e-6, 1e6))


KEYS: Mapping[str, Key] = {
    # ---------------------------------------------------------------------------------------------------- sizes
    **dict.fromkeys(("n_layer", "num_hidden_layers", "num_layers"), _REQUIRED_COUNT),
    **dict.fromkeys(("n_head", "num_attention_heads", "num_heads"), _REQUIRED_COUNT),
    **dict.fromkeys(("n_embd", "hidden_size", "d_model"), _REQUIRED_WIDTH),
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads"), _COUNT),
    **dict.fromkeys(("head_dim", "d_kv"), _WIDTH),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"), _REQUIRED_WIDTH),
    "q_lora_rank": _WIDTH,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), _COUNT),
    **dict.fromkeys(("n_group", "topk_group", "num_decoder_layers"), _COUNT),
    "first_k_dense_replace": _integer(0, 2**16, default=0),
    # ------------------------------------------------------------------------------------------------ positions
    **dict.fromkeys(("n_positions", "max_position_embeddings"), _POSITIONS),
    "original_max_position_embeddings": _number(2, 2**31 - 1),
    "pad_token_id": _integer(0, 2**31 - 2, default=1, null="refused"),
    "relative_attention_num_buckets": _COUNT,
    "relative_attention_max_distance": _POSITIONS,
    "rotary_dim": _integer(2, 2**24, null="refused"),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), _BASE),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _FRACTION),
    "rope_interleave": _flag(default=True),
    "alibi": _flag(default=False),
    # ------------------------------------------------------------------------------------------ attention scores
    "query_pre_attn_scalar": _number(1e-6, 1e6, default=256.0),
    "scale_attn_weights": _flag(default=True),
    "scale_attn_by_inverse_layer_idx": _flag(default=False),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _number(1e-6, 1e6, null="value")),
    "sliding_window": _integer(1, 2**31 - 1, default=4096, null="value"),
    "sliding_window_pattern": _integer(1, 2**16, default=6),
    "use_sliding_window": _flag(default=False),
    "max_window_layers": _integer(0, 2**16, default=28),
    "layer_types": _list(f"{' or '.join(LAYER_TYPES)}, one per layer", lambda value: value in LAYER_TYPES, at_least=1),
    # -------------------------------------------------------------------------------- norms, feed-forward, order
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "rms_norm_eps"), _EPS),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation", "activation_function"), _TEXT),
    **dict.fromkeys(("feed_forward_proj", "gated_activation", "dense_act_fn"), _TEXT),
    "norm_topk_prob": _flag(default=False),
    "topk_method": _TEXT,
    "routed_scaling_factor": _number(1e-6, 1e6, default=1.0),
    "is_encoder_decoder": _flag(default=True),
    "decoder_sparse_step": _integer(1, 2**16, default=1),
    "mlp_only_layers": _list("layer numbers", lambda value: type(value) is int and value >= 0),
    "use_parallel_residual": _flag(default=True),
    "parallel_attn": _flag(default=True),
    "new_decoder_architecture": _flag(default=False),
    "multi_query": _flag(default=True),
    "do_layer_norm_before": _flag(default=True),
    "_remove_final_layer_norm": _flag(default=False),
    "tie_word_embeddings": _flag(default=True),
    "scale_decoder_outputs": Key("true or false", lambda value: type(value) is bool),  # as tie_word_embeddings
}

# Members of the section on rotary embeddings. Those that only some variants need have no default.
ROPE_KEYS: Mapping[str, Key] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "rope_theta": _BASE,
    "partial_rotary_factor": _FRACTION,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _WEIGHT),
    "original_max_position_embeddings": KEYS["original_max_position_embeddings"],
    "truncate": _flag(default=True),
    **dict.fromkeys(("short_factor", "long_factor"), _FACTORS),
}


def read_model_type(config: Config) -> Any:
    """Return the value of `model_type`, of any type."""
    return config.get("model_type")


def read_settings(row: Architecture, config: Config, where: str, function: str) -> Settings:
    """Return the typed value of every key that a row reads, under the name by which the row reads it.

    A key that is missing has its default, None without one; so has a key that is null, unless null is a value of its
    own. Numbers are floats. `rope_parameters` is the section on rotary embeddings, or {type of layer: section}.

    Raises
    ------
    FileFormatError
        If a value has another type or lies outside its range, or the row does not support it.
    """
    for key, allowed in row.required.items():
        value = config.get(key)
        if not any(type(value) is type(known) and value == known for known in allowed):
            raise FileFormatError(
                f"{function}: {key} of a {row.model_type} must be {allowed[0]!r}, got {short_repr(value)} in {where}; "
                f"{row.refusal}."
            )
    reader = _ConfigReader(config, where, function)
    settings = {key: reader.value(key, row.defaults) for key in row.config_keys}
    if row.rope is not None:
        settings[_ROPE_SECTION] = reader.rope()
    listed, n_layers = settings.get("layer_types"), settings[row.n_layers]
    if listed is not None and len(listed) != n_layers:
        raise FileFormatError(
            f"{function}: layer_types in {where} must list the types of {n_layers} layers, got {len(listed)}; "
            "repair it."
        )
    return settings


@dataclass(frozen=True)
class _ConfigReader:
    config: Config
    where: str
    function: str

    def value(self, key: str, defaults: Mapping[str, Any]) -> Any:
        """Return the value of a key, or of a synonym where the key is missing."""
        kind, name = KEYS[key], self.stated(key)
        default = defaults.get(key, kind.default)
        if name not in self.config:
            return self.refuse(name, kind, None) if kind.is_required and default is None else default
        value = self.config[name]
        if value is None and kind.null == "default" and not kind.is_required:
            return default
        return self.typed(name, kind, value)

    def stated(self, key: str) -> str:
        """Return the first of the key and its synonyms that is not null, else the first that is there, else the key."""
        names = (key, *(name for group in SYNONYMS if key in group for name in group if name != key))
        there = [name for name in names if name in self.config]
        return next((name for name in there if self.config[name] is not None), [*there, key][0])

    def typed(self, name: str, kind: Key, value: Any) -> Any:
        """Return a value, checked and converted."""
        if value is None and kind.null == "value":
            return None
        if not kind.accepts(value):
            self.refuse(name, kind, value)
        return kind.convert(value)

    def refuse(self, name: str, kind: Key, value: Any) -> NoReturn:
        raise FileFormatError(
            f"{self.function}: {name} in {self.where} must be {kind.expected}, got {short_repr(value)}; repair it."
        )

    def rope(self) -> dict[str, Any]:
        """Return the section on rotary embeddings, {} without one; by type of layer where the config lists these."""
        name = self.stated(_ROPE_SECTION)
        section = self.object(name, self.config.get(name))
        if not any(kind in section for kind in LAYER_TYPES):
            return self.rope_members(name, section)
        of_types = {kind: f"{kind} of {name}" for kind in LAYER_TYPES if kind in section}
        return {kind: self.rope_members(place, self.object(place, section[kind])) for kind, place in of_types.items()}

    def rope_members(self, place: str, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a section that are not null."""
        return {
            name: self.typed(f"{name} of {place}", kind, section[name])
            for name, kind in ROPE_KEYS.items()
            if section.get(name) is not None
        }

    def object(self, place: str, value: Any) -> Mapping[str, Any]:
        """Return a JSON object, {} for null."""
        if value is not None and not isinstance(value, Mapping):
            self.refuse(place, Key("an object", bool), value)
        return value or {}
