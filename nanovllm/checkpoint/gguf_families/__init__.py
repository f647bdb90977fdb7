"""What is particular to an architecture in GGUF files: names of tensors, keys of its config, changes to its tensors.

A module is imported when a file of its architecture is read. No torch where only the config is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile
    from nanovllm.checkpoint.stored import Stored

MODULES = {  # general.architecture: the module that describes it
    "deepseek2": "deepseek",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "glm4": "glm4",
    "gpt-oss": "gpt_oss",
    "granite": "granite",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "llama": "plain",
    "mistral3": "mistral3",
    "olmo2": "olmo",
    "phi3": "phi3",
    "qwen2": "plain",
    "qwen3": "plain",
    "qwen35": "qwen3_next",
    "qwen35moe": "qwen3_next",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "smollm3": "smollm3",
}


def _nothing(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    return {}


def _no_blocks(file: GGUFFile) -> Mapping[str, int]:
    return {}


def _as_stored(file: GGUFFile, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    yield from tensors


@dataclass(frozen=True, kw_only=True)
class GGUFFamily:
    hf_class: str
    model_type: str  # as Hugging Face calls it
    # names of a layer's tensors: added to the common names, or replacing them
    names: Mapping[str, str] = field(default_factory=dict)
    top_names: Mapping[str, str] = field(default_factory=dict)  # of tensors outside the layers
    permuted: bool = False  # the converter permuted the rows of attn_q and attn_k for interleaved RoPE
    partial_rotary: bool = False  # a part of each head may be rotated
    experts: bool = False
    # Keys whose values may differ between layers; the common config has the largest.
    uneven: frozenset[str] = frozenset()
    # Endings of the HF names of tensors whose columns are read in another order, and how many neighbours keep theirs.
    column_blocks: Callable[[GGUFFile], Mapping[str, int]] = _no_blocks
    # From the file and the config that all families have: what this one has beyond that, or in its place.
    config: Callable[[GGUFFile, dict[str, Any]], dict[str, Any]] = _nothing
    # From the file and its (HF name, tensor): those in the layout of Hugging Face's files.
    tensors: Callable[[GGUFFile, Iterable[tuple[str, Stored]]], Iterator[tuple[str, Stored]]] = _as_stored


def family_of(architecture: str) -> GGUFFamily:
    families: dict[str, GGUFFamily] = import_module(f"{__name__}.{MODULES[architecture]}").FAMILIES
    return families[architecture]


def windowed_layers(file: GGUFFile, num_layers: int, *, period: int) -> list[bool]:
    """Whether each layer has a window: the metadata lists them, or says that every n-th has none (or `period`-th)."""
    stated = file.per_layer("attention.sliding_window_pattern")
    if stated is None:
        every = file.count("attention.sliding_window_pattern", default=period)
        return [(index + 1) % every != 0 for index in range(num_layers)]
    return [bool(one) for one in stated]


def layer_types(windowed: Iterable[bool]) -> list[str]:
    """The value of layer_types in the HF config."""
    return ["sliding_attention" if one else "full_attention" for one in windowed]
