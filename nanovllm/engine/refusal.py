"""Why a sequence could never run: the text of its refusal."""

from nanovllm.config import SchedulerConfig
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestError


def refusal(seq: Sequence, num_computed: int, config: SchedulerConfig) -> RequestError:
    """The error for a sequence that is too long. `num_computed`: how many of its tokens need room in the KV cache."""
    if seq.num_tokens == 0:
        return RequestError("the prompt is empty: at least one token is needed to continue from")
    if seq.num_tokens >= config.max_model_len + (seq.pooling is not None):
        return RequestError(
            f"the prompt has {seq.num_tokens} tokens, and max_model_len={config.max_model_len} must also hold at "
            "least one new token: shorten the prompt or raise max_model_len"
        )
    needs = ((group, group.blocks_needed(num_computed, config.block_size)) for group in config.groups)
    group, needed = next((group, needed) for group, needed in needs if needed > group.num_blocks)
    window = "" if group.window is None else f" for a window of {group.window} tokens"
    return RequestError(
        f"the prompt of {seq.num_tokens} tokens and up to {max(1, seq.max_num_tokens - seq.num_tokens)} new ones need "
        f"{needed} KV blocks of {config.block_size} tokens{window}, and there are {group.num_blocks}: shorten the "
        "prompt, lower max_tokens or give the KV cache more memory"
    )
