"""Granite 3, 4.0 and 4.1 (dense): the plain shape with four scalars: of embedding, attention scores, residuals, logits.

Instead of multiplying what each layer adds by r, the embedding is divided by it: every sum is then 1/r of what it was,
and a norm gives the same if its eps is divided by r squared.

The dense models of Granite 4.0 have the architecture of the hybrid ones, with attention in every layer and no experts
but the shared one, which is the MLP. Mamba layers and experts are refused.
"""

from dataclasses import replace
from typing import Any

from nanovllm.checkpoint.names import FileNames
from nanovllm.errors import CheckpointError
from nanovllm.layers.refine import refine
from nanovllm.layers.stored_spec import StoredMlpSpec
from nanovllm.models.changes import change_attention
from nanovllm.models.known_values import check_known
from nanovllm.models.llama import spec as llama
from nanovllm.models.scales import Scales
from nanovllm.models.spec import ModelSpec, count

HYBRID = "GraniteMoeHybridForCausalLM"
HYBRID_KNOWN = {"num_local_experts": (0,), "position_embedding_type": ("rope",)}
HYBRID_NAMES = FileNames(
    renamed=(
        (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
    )
)


def spec(raw: dict[str, Any]) -> ModelSpec:
    check_known(raw, {"normalization_function": ("rmsnorm",)})
    model = _dense_hybrid(raw) if raw["architectures"][0] == HYBRID else llama(raw)
    r, scale = float(raw.get("residual_multiplier", 1.0)), float(raw.get("attention_multiplier", 1.0))
    eps = model.norm_eps / r**2
    model = change_attention(model, lambda _, attention: replace(attention, scale=scale))
    return replace(
        model,
        layers=tuple(replace(layer, norm_eps=eps) for layer in model.layers),
        norm_eps=eps,
        scales=Scales(
            embedding=float(raw.get("embedding_multiplier", 1.0)) / r,
            logits=1 / float(raw.get("logits_scaling", 1.0)),
        ),
    )


def _dense_hybrid(raw: dict[str, Any]) -> ModelSpec:
    kinds = raw.get("layer_types", raw.get("layers_block_type")) or ["mamba"]
    if not set(kinds) <= {"attention", "full_attention"}:
        raise CheckpointError(f"config: layer_types={sorted(set(kinds))}: only attention is implemented for {HYBRID}")
    check_known({"num_local_experts": 8, "position_embedding_type": None} | raw, HYBRID_KNOWN)
    model = llama({**raw, "intermediate_size": count(raw, "shared_intermediate_size"), "mlp_bias": False})
    layers = (replace(layer, feed_forward=refine(StoredMlpSpec, layer.feed_forward)) for layer in model.layers)
    return replace(model, layers=tuple(layers), file_names=HYBRID_NAMES)
