"""The GET routes: is the server well, what does it serve, what has it done."""

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nanovllm import __version__
from nanovllm.errors import EngineError
from nanovllm.server.http import JsonAnswer
from nanovllm.server.metrics import CONTENT_TYPE
from nanovllm.server.service import HEALTH_SECONDS, Service


class Info:
    """Handlers that read the service and change nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """200 only while the engine makes progress or is idle. A full queue is no ill health."""
        await self._service.check_health()
        return JsonAnswer({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while one more request would be taken."""
        await self._service.check_health()
        self._service.check_room()
        return JsonAnswer({"status": "ready"})

    async def version(self, request: Request) -> Response:
        return JsonAnswer({"version": __version__})

    async def models(self, request: Request) -> Response:
        return JsonAnswer({"object": "list", "data": [self._card(name) for name in self._service.model_names]})

    async def model(self, request: Request) -> Response:
        return JsonAnswer(self._card(self._service.check_model(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, object]:
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
        """The server's own numbers are there even when the engine is not."""
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
