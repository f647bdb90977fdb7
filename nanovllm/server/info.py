"""The GET routes: health, readiness, version, models and metrics."""

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nanovllm import __version__
from nanovllm.errors import EngineError
from nanovllm.server.http import JsonResponse
from nanovllm.server.metrics import CONTENT_TYPE
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
