"""Granite 3 and 4.1 (dense): the plain shape with four scalars: of embedding, attention scores, residuals and logits.

Instead of multiplying what each layer adds by r, the embedding is divided by it: every sum is then 1/r of what it was,
and a norm gives the same if its eps is divided by r squared.
"""

from dataclasses import replace
from typing import Any

from nanovllm.models.changes import change_attention
from nanovllm.models.llama import spec as llama
from nanovllm.models.scales import Scales
from nanovllm.models.spec import ModelSpec


def spec(raw: dict[str, Any]) -> ModelSpec:
    model, r = llama(raw), float(raw.get("residual_multiplier", 1.0))
    eps, scale = model.norm_eps / r**2, float(raw.get("attention_multiplier", 1.0))
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
