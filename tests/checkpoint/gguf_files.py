"""Small GGUF models, written by the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from nanovllm.checkpoint import gguf_header
from nanovllm.checkpoint.gguf import GGUFFile

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, EXPERTS, EXPERT_FFN = 64, 4, 2, 16, 96, 40, 2, 4, 32


def layer_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, q),
        "ffn_norm.weight": (HIDDEN,),
    }
    if arch == "qwen2":
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch in ("qwen3", "qwen3moe"):
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if arch == "qwen3moe":
        return shapes | {
            "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
            "ffn_gate_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
            "ffn_up_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
            "ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_FFN),
        }
    return shapes | {
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }


def model_tensors(arch: str, *, tied: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes(arch).items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def model_writer(path: Path, arch: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_vocab_size(VOCAB)
    if arch != "llama":
        writer.add_key_length(HEAD_DIM)
    if arch == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_FFN)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<s>", "</s>", *(chr(ord("a") + i) for i in range(26)), "ab", "abc"])
    writer.add_token_types([3, 3] + [1] * 28)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, arch: str, *, tied: bool = False, **metadata: Any) -> dict[str, np.ndarray]:
    writer = model_writer(path, arch)
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key.replace("__", "."), value)
    tensors = model_tensors(arch, tied=tied)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return tensors


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    with GGUFFile(path) as file:
        return file.hf_config(), file.generation_config(), dict(file.iter_tensors(torch.float32))


def random_blocks(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes as quantized blocks, NaN and infinite scales included."""
    block, size = gguf_header.BLOCKS[name]
    row = shape[-1] // block * size
    return np.random.default_rng(len(name)).integers(0, 256, (*shape[:-1], row), dtype=np.uint8)
