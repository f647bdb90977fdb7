"""The GET routes: health, readiness, load, version, models, the tokenizer and metrics."""

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nanovllm import __version__
from nanovllm.errors import EngineError
from nanovllm.server.http import JsonResponse
from nanovllm.server.metrics import CONTENT_TYPE
from nanovllm.server.prompts import require_tokenizer
from nanovllm.server.service import HEALTH_SECONDS, Service


class Info:
    """Handlers that only read the state of the service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """200 while the engine makes progress or is idle. A full queue is healthy."""
        await self._service.check_health()
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while another request would be accepted."""
        await self._service.check_health()
        self._service.check_capacity()
        return JsonResponse({"status": "ready"})

    async def load(self, request: Request) -> Response:
        """The number of prompts that wait or run, under vLLM's name."""
        return JsonResponse({"server_load": self._service.num_open_prompts})

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": __version__})

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._card(name) for name in self._service.model_names]})

    async def model(self, request: Request) -> Response:
        return JsonResponse(self._card(self._service.check_model(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, object]:
        """The model object of the OpenAI API."""
        engine = self._service.engine
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "nanovllm",
            "root": engine.model_name,
            "parent": None,
            "max_model_len": engine.max_model_len,
        }

    async def tokenizer(self, request: Request) -> Response:
        """The tokenizer's settings in the form of tokenizer_config.json, as vLLM returns them."""
        engine, tokenizer = self._service.engine, require_tokenizer(self._service.engine)
        templates = tokenizer.chat_templates
        added = {
            str(id): {"content": token.content, "special": token.special}
            for id, token in sorted(tokenizer.backend.get_added_tokens_decoder().items())
        }
        info: dict[str, object] = {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": engine.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            "added_tokens_decoder": added,
            **tokenizer.special_tokens,
        }
        if templates:
            named = [{"name": name, "template": template} for name, template in templates.items()]
            info["chat_template"] = templates["default"] if list(templates) == ["default"] else named
        return JsonResponse(info)

    async def metrics(self, request: Request) -> Response:
        """All metrics. Without a running engine, only those of the server."""
        service = self._service
        name, stats = "", None
        if service.is_loaded:
            name = service.model_names[0]
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(HEALTH_SECONDS):
                    stats = await service.engine.stats()
        return PlainTextResponse(
            service.metrics.render(name, stats, started=service.started), headers={"content-type": CONTENT_TYPE}
        )
