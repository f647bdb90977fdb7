"""Qwen3-Next and Qwen3.5, dense and with experts. Norms are stored as 1 + w, A_log as -exp(A_log).

In files of Qwen3.5 the value heads of the delta net are ordered by their number among those of a key head, then by key
head; here, as in Hugging Face's files, the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile
    from nanovllm.checkpoint.stored import Stored

OUT = "linear_attn.out_proj.weight"


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    num_layers, num_values = plain["num_hidden_layers"], file.count("ssm.time_step_rank")
    recurrent = file.per_layer("attention.recurrent_layers")
    if recurrent is None:
        interval = file.count("full_attention_interval", default=4)
        recurrent = [(index + 1) % interval != 0 for index in range(num_layers)]
    config = {
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:num_layers]],
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
        "linear_key_head_dim": file.count("ssm.state_size"),
        "linear_num_key_heads": file.count("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": file.count("ssm.inner_size") // num_values,
        "linear_by_key_head": False,
        "norm_offset": 0.0,  # the file has 1 + w
    }
    if file.family.experts:
        config |= {
            "num_experts": file.count("expert_count"),
            "num_experts_per_tok": file.count("expert_used_count"),
            "moe_intermediate_size": file.count("expert_feed_forward_length"),
            "shared_expert_intermediate_size": file.count(
                "expert_shared_feed_forward_length", default=plain["intermediate_size"]
            ),
            "norm_topk_prob": True,
        }
    return config


def _heads(file: GGUFFile) -> tuple[int, int, int]:
    """Key heads and value heads of the delta net, and numbers of a value head."""
    num_values = file.count("ssm.time_step_rank")
    return file.count("ssm.group_count"), num_values, file.count("ssm.inner_size") // num_values


def _reordered(file: GGUFFile) -> Mapping[str, int]:
    """With one value head for each key head both orders are the same."""
    num_keys, num_values, size = _heads(file)
    return {} if file.architecture == "qwen3next" or num_keys == num_values else {OUT: size}


def _tensors(file: GGUFFile, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    import torch

    from nanovllm.checkpoint.gguf_families.changed import Changed, as_filters
    from nanovllm.checkpoint.packed.gguf import ReorderedColumns
    from nanovllm.checkpoint.reordered import Reordered, reorder

    num_keys, num_values, size = _heads(file)
    per_key = num_values // num_keys
    queries_and_keys = range(2 * num_keys * file.count("ssm.state_size"))
    tiled = bool(_reordered(file))
    heads = [j * num_keys + key if tiled else key * per_key + j for key in range(num_keys) for j in range(per_key)]
    values = [head * size + number for head in heads for number in range(size)]
    channels = [*queries_and_keys, *(len(queries_and_keys) + row for row in values)]
    orders = {"in_proj_qkv": channels, "in_proj_z": values, "conv1d": channels, "dt_bias": heads, "A_log": heads}
    orders |= {"in_proj_a": heads, "in_proj_b": heads}
    for name, tensor in tensors:
        module = name.removesuffix(".weight").rpartition(".")[2]
        if ".linear_attn." in name and module in orders and tiled:
            tensor = reorder(tensor, orders[module])
        if module == "A_log":
            yield name, Changed(tensor, tensor.shape, lambda read: torch.log(-read))
        elif module == "conv1d":
            yield name, as_filters(tensor)
        elif module == "in_proj_ba":  # of each key head: b of its value heads, then a
            rows = [2 * key * per_key + j for key in range(num_keys) for j in range(per_key)]
            for part, first in (("b", 0), ("a", per_key)):
                own = Reordered(tensor, [row + first for row in rows])
                yield name.replace("_ba", f"_{part}"), Changed(own, (num_values, *tensor.shape[1:]), lambda read: read)
        elif name.endswith(OUT) and tiled:
            yield name, ReorderedColumns(tensor, heads, size)
        elif module == "shared_expert_gate" and len(tensor.shape) == 1:
            yield name, Changed(tensor, (1, *tensor.shape), lambda read: read.unsqueeze(0))
        else:
            yield name, tensor


LINEAR = {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_ba": "in_proj_ba",
    "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    **{name: f"linear_attn.{own}" for name, own in LINEAR.items()},
}


def _family(hf_class: str, model_type: str, *, experts: bool) -> GGUFFamily:
    return GGUFFamily(
        hf_class=hf_class,
        model_type=model_type,
        names=NAMES,
        partial_rotary=True,
        experts=experts,
        column_blocks=_reordered,
        config=_config,
        tensors=_tensors,
    )


FAMILIES = {
    "qwen3next": _family("Qwen3NextForCausalLM", "qwen3_next", experts=True),
    "qwen35": _family("Qwen3_5ForCausalLM", "qwen3_5_text", experts=False),
    "qwen35moe": _family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", experts=True),
}
