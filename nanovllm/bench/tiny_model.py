"""Writes a tiny model with one token per byte to a folder, for tests in which the answers do not matter.

With `load_format="dummy"` it loads at once, accepts and generates any text, and can follow any grammar.
"""

import json
from pathlib import Path

from nanovllm.models.spec import ModelSpec

# A placeholder for benchmarks and tests that run no model but need its spec.
NO_MODEL = ModelSpec(
    architecture="none",
    vocab_size=2,
    hidden_size=1,
    layers=(),
    norm_eps=1e-6,
    max_position=1,
    tie_word_embeddings=True,
    dtype="float32",
)
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, max_model_len: int = 2048) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json to `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(SPECIAL_TOKENS[1]),
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = {"eos_token": SPECIAL_TOKENS[1], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
