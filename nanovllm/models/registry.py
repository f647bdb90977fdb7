"""Which architectures are known, and how a model's spec is found; no torch."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.json_file import read_json
from nanovllm.errors import CheckpointError
from nanovllm.models.spec import ModelSpec, token_id_list

Family = Callable[[dict[str, Any]], ModelSpec]  # from a Hugging Face style config


def _family(module: str) -> Family:
    """The family of a module in this package, imported when its first model is described."""
    return lambda raw: import_module(f"nanovllm.models.{module}").spec(raw)


ENDS = ("ForCausalLM", "ForConditionalGeneration")  # of the text model alone, and with other parts
ARCHITECTURES = {  # of each family
    "deepseek": ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    "gemma3": tuple(f"Gemma3{end}" for end in ENDS),
    "gemma4": tuple(f"Gemma4{kind}{end}" for kind in ("", "Unified") for end in ENDS),
    "glm4": ("Glm4ForCausalLM", "GlmForCausalLM"),
    "gpt_oss": ("GptOssForCausalLM",),
    "granite": ("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    "olmo": ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    "phi3": ("Phi3ForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "qwen3_next": ("Qwen3NextForCausalLM", *(f"Qwen3_5{kind}{end}" for kind in ("", "Moe") for end in ENDS)),
    "smollm3": ("SmolLM3ForCausalLM",),
}
FAMILIES: dict[str, Family] = {name: _family(module) for module, names in ARCHITECTURES.items() for name in names}


def parse_config(raw: dict[str, Any]) -> ModelSpec:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise CheckpointError("config: 'architectures' is missing, so the kind of model is unknown")
    architecture = names[0]
    if architecture not in FAMILIES:
        near = difflib.get_close_matches(str(architecture), FAMILIES, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise CheckpointError(f"architecture {architecture!r} is not known{hint}; known: {', '.join(FAMILIES)}")
    try:
        model = FAMILIES[architecture](raw)
        if quantization := raw.get("quantization_config") or raw.get("compression_config"):
            from nanovllm.checkpoint.packed.config import read_packing

            model = replace(model, packing=read_packing(quantization).in_specs(model.file_names))
        return model
    except KeyError as error:
        raise CheckpointError(f"config: {error.args[0]!r} is missing for {architecture}") from error
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"config: a value of {architecture} is of the wrong kind: {error}") from error


@dataclass(frozen=True)
class Description:
    """What a checkpoint says about itself, apart from its weights."""

    config: ModelSpec
    gguf_metadata: dict[str, Any] | None  # None for a folder


def describe(path: Path) -> Description:
    """Read the description of a model folder or a GGUF file."""
    if path.is_file():
        from nanovllm.checkpoint.gguf import GGUFFile
        from nanovllm.checkpoint.packed.gguf_types import packing_of

        with GGUFFile(path) as file:
            config = _with_all_eos(file.hf_config(), file.generation_config())
            packing = packing_of(file.tensor_types(), file.family.column_blocks(file))
            return Description(replace(config, packing=packing), file.metadata)
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    raw = read_json(path / "config.json")
    if (modelopt := path / "hf_quant_config.json").exists() and not raw.get("quantization_config"):
        raw["quantization_config"] = {**read_json(modelopt), "quant_method": "modelopt"}
    config = _with_all_eos(raw, generation)
    if config.packing is not None or any(path.glob("*.safetensors")):
        from nanovllm.checkpoint.as_stored import as_stored

        config = as_stored(config, path)
    return Description(config, None)


def _with_all_eos(raw: dict[str, Any], generation: dict[str, Any]) -> ModelSpec:
    config = parse_config(raw)
    eos = token_id_list(generation.get("eos_token_id"))
    return replace(config, eos_token_ids=tuple(dict.fromkeys(eos + config.eos_token_ids)))
