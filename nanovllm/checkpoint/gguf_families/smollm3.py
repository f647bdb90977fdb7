"""SmolLM3: every fourth layer does not rotate queries and keys. The metadata does not say so; llama.cpp knows it."""

from nanovllm.checkpoint.gguf_families import GGUFFamily

FAMILIES = {
    "smollm3": GGUFFamily(
        hf_class="SmolLM3ForCausalLM",
        model_type="smollm3",
        permuted=True,
        config=lambda file, plain: {"no_rope_layer_interval": 4},
    )
}
