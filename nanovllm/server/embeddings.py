"""POST /v1/embeddings of the OpenAI API: the model's last hidden states, pooled and normalized to length 1."""

import asyncio
import base64
import struct
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.server.calls import Call
from nanovllm.server.errors import ApiError, refuse
from nanovllm.server.prompts import read_prompts
from nanovllm.server.protocol import EmbeddingRequest, parse_request
from nanovllm.server.service import Service
from nanovllm.server.truncation import read_truncation

POOLINGS = ("mean", "last")
FORMATS = ("float", "base64")


async def embed(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any]:
    """Handle a request: the response body."""
    request = parse_request(body, EmbeddingRequest)
    model = service.check_model(request.model)
    pooling, encoding = request.pooling or "mean", request.encoding_format or "float"
    if pooling not in POOLINGS:
        raise refuse("pooling", f"must be one of {', '.join(POOLINGS)}")
    if encoding not in FORMATS:
        raise refuse("encoding_format", f"must be one of {', '.join(FORMATS)}")
    hidden_size = service.engine.model_config.hidden_size
    if request.dimensions not in (None, hidden_size):
        raise refuse("dimensions", f"must be {hidden_size}, the size of this model's embeddings, or be left out")
    prompts = await read_prompts(
        service.engine,
        request.input,
        field="input",
        add_special_tokens=request.add_special_tokens is not False,
        max_prompts=service.settings.max_prompts_per_request,
        is_completed=False,
        truncation=read_truncation(
            request.truncate_prompt_tokens,
            request.truncation_side,
            default_side="right",
            room=service.engine.max_model_len,
        ),
    )
    call.num_prompt_tokens = sum(map(len, prompts))
    vectors = await _embed_all(service, prompts, pooling)
    data = [
        {"object": "embedding", "index": index, "embedding": _encode_vector(vector, encoding)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": call.num_prompt_tokens, "total_tokens": call.num_prompt_tokens}
    id = f"embd-{request.request_id or call.internal_id}"
    return {"id": id, "object": "list", "created": call.created, "data": data, "model": model, "usage": usage}


async def _embed_all(service: Service, prompts: list[list[int]], pooling: str) -> list[list[float]]:
    async def embed_one(number: int, token_ids: list[int]) -> list[float]:
        try:
            return await service.engine.embed(token_ids, pooling)
        except RequestError as error:  # such as: more tokens than fit into the KV cache
            name = "input" if len(prompts) == 1 else f"input[{number}]"
            raise ApiError(400, f"{name}: {error}", param="input") from error

    try:
        with service.admit(len(prompts)):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(embed_one(number, token_ids)) for number, token_ids in enumerate(prompts)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _encode_vector(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
