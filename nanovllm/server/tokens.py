"""POST /tokenize and /detokenize: convert between text and token ids without running the model."""

from typing import Any

from nanovllm.server.calls import Call
from nanovllm.server.errors import refuse
from nanovllm.server.parsers import check_tools
from nanovllm.server.prompts import PromptLimit, render_chat, require_tokenizer, run_in_thread_if_long
from nanovllm.server.protocol import DetokenizeRequest, TokenizeRequest, parse_request
from nanovllm.server.service import Service


async def tokenize(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any]:
    """Handle a request: the token ids of a prompt or of a conversation."""
    request = parse_request(body, TokenizeRequest)
    service.check_model(request.model)
    engine, tokenizer = service.engine, require_tokenizer(service.engine)
    if (request.prompt is None) == (request.messages is None):
        raise refuse("prompt", "set exactly one of prompt and messages")
    if request.messages is not None:
        check_tools(request.tools or [])
        continued = bool(request.continue_final_message)
        _, token_ids = await render_chat(
            engine,
            request.messages,
            tools=request.tools,
            add_generation_prompt=not continued
            if request.add_generation_prompt is None
            else request.add_generation_prompt,
            continue_final_message=continued,
            add_special_tokens=bool(request.add_special_tokens),
            template_kwargs=request.chat_template_kwargs,
        )
    else:
        text = request.prompt or ""
        PromptLimit(engine.max_model_len).check_chars(len(text), "prompt")
        token_ids = await run_in_thread_if_long(
            len(text), lambda: tokenizer.encode(text, request.add_special_tokens is not False)
        )
    response = {"count": len(token_ids), "max_model_len": engine.max_model_len, "tokens": token_ids, "token_strs": None}
    if request.return_token_strs:
        response["token_strs"] = [tokenizer.id_to_token(token_id) for token_id in token_ids]
    return response


async def detokenize(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any]:
    """Handle a request: the text of the token ids."""
    request = parse_request(body, DetokenizeRequest)
    service.check_model(request.model)
    tokenizer = require_tokenizer(service.engine)
    if len(request.tokens) > service.engine.max_model_len:
        raise refuse("tokens", f"{len(request.tokens)} tokens; at most {service.engine.max_model_len} are accepted")
    bad = next((token_id for token_id in request.tokens if not 0 <= token_id < tokenizer.vocab_size), None)
    if bad is not None:
        raise refuse("tokens", f"token id {bad} is outside the vocabulary of {tokenizer.vocab_size} tokens")
    text = await run_in_thread_if_long(
        len(request.tokens), lambda: tokenizer.decode(request.tokens, skip_special_tokens=False)
    )
    return {"prompt": text}
