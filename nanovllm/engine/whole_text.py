"""The text of a completion that has ended, made at once from all its tokens."""

from nanovllm.engine.sequence import Sequence
from nanovllm.text.tokenizer import Tokenizer


def whole_text(seq: Sequence, tokenizer: Tokenizer) -> str:
    begin = seq.num_prompt_tokens
    pieces = tokenizer.pieces(seq.params.skip_special_tokens)
    return pieces.text(seq.token_ids[:begin], seq.token_ids[begin : end_of_text(seq)])


def end_of_text(seq: Sequence) -> int:
    """The end of the tokens that become text: a stop token does not, unless the request asks for it."""
    by_token = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
    return seq.num_tokens - (by_token and not seq.params.include_stop_str_in_output)
