"""A model's shape, one entry per layer, read from a Hugging Face style config; no torch.

`rope_theta`/`rope_scaling` (older) and `rope_parameters` (transformers 5) are both read, and so are `dtype` and
`torch_dtype`. What this decoder would compute differently from the reference is refused here, never ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.errors import CheckpointError
from nanovllm.layers.spec import AttentionSpec, Dim, LayerSpec, MlpSpec, RopeSpec, Weight
from nanovllm.state import StateGroup, state_groups

if TYPE_CHECKING:
    from nanovllm.checkpoint.names import FileNames
    from nanovllm.models.per_layer_spec import PerLayerSpec
    from nanovllm.models.scales import Scales
    from nanovllm.weights.forms import Packing

CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float  # of the norm before the head
    max_position: int
    tie_word_embeddings: bool  # the head uses the embedding's weight
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    norm_offset: float | None = None  # see Weight
    scales: "Scales | None" = None  # of embedded tokens and of logits
    per_layer: "PerLayerSpec | None" = None  # embeddings that give every layer an input of its own
    packing: "Packing | None" = None  # how a quantized checkpoint stores its linears
    file_names: "FileNames | None" = None  # where those of tensors differ from the ones that the layers state

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def embedding_weight(self) -> Weight:
        vocab = Dim(self.vocab_size, divided="tokens of the vocabulary", pads=True)
        return Weight(("model.embed_tokens.weight",), (vocab,), Dim(self.hidden_size))

    def head_weight(self) -> Weight:
        """The output head's own weight or, where they are tied, the embedding's."""
        embedding = self.embedding_weight()
        return embedding if self.tie_word_embeddings else replace(embedding, names=("lm_head.weight",), packable=True)

    def state_groups(self, dtype: str = "float32") -> tuple[StateGroup, ...]:
        """What the layers keep of a sequence, in groups; `dtype`: of the KV cache."""
        return state_groups([layer.mixer.state(dtype) for layer in self.layers])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the groups whose state is paged."""
        return tuple(group.window for group in self.state_groups() if group.paged)

    @property
    def keeps_row_state(self) -> bool:
        """Whether a layer keeps one state per sequence."""
        return not all(group.paged for group in self.state_groups())


def llama_shaped(
    raw: dict[str, Any],
    *,
    windows: Sequence[int | None] | None = None,  # of each layer; None = full attention everywhere
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelSpec:
    """The spec of a Llama-shaped model, from the part of its config that all such families spell alike."""
    architecture = raw["architectures"][0]
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act={act!r}: only silu is implemented for {architecture}")
    num_heads = count(raw, "num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    hidden_size = count(raw, "hidden_size")
    if num_heads % num_kv_heads:
        raise CheckpointError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")
    num_layers = count(raw, "num_hidden_layers")
    head_dim = raw.get("head_dim") or hidden_size // num_heads
    max_position = count(raw, "max_position_embeddings")
    rope = read_rope(raw, head_dim=head_dim, max_position=max_position)
    eps = float(raw.get("rms_norm_eps", 1e-6))
    attention = AttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm_eps=eps if qk_norm else None,
    )
    mlp = MlpSpec(hidden_size=hidden_size, intermediate_size=count(raw, "intermediate_size"), bias=mlp_bias)
    layer = LayerSpec(hidden_size=hidden_size, mixer=attention, feed_forward=mlp, norm_eps=eps)
    windows = windows or (None,) * num_layers
    return ModelSpec(
        architecture=architecture,
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(replace(layer, mixer=replace(attention, window=windows[i])) for i in range(num_layers)),
        norm_eps=eps,
        max_position=max_position if rope.scaling is None else rope.scaling.longest(max_position),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw),
        eos_token_ids=token_id_list(raw.get("eos_token_id")),
    )


def read_rope(raw: dict[str, Any], *, head_dim: int, max_position: int) -> RopeSpec:
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor: rotating only a part of each head is not implemented")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta=theta)
    from nanovllm.models.scaled_rope import read_scaling

    scaling = read_scaling(kind, parameters, max_position=max_position, num_frequencies=head_dim // 2)
    return RopeSpec(theta=theta, scaling=scaling)


def token_id_list(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def count(raw: dict[str, Any], name: str, *, most: int | None = None) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise CheckpointError(f"config: {name}={value!r} must be an integer of at least 1{limit}")
    return value


def _dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in CHECKPOINT_DTYPES:
        raise CheckpointError(f"config: dtype={name!r}; known: {', '.join(CHECKPOINT_DTYPES)}")
    return name
