"""Every option of the server, in vLLM's words where it has one."""

import math
from dataclasses import dataclass

from nanovllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How to listen, whom to serve, and how much of everything a client may ask for."""

    host: str = "127.0.0.1"  # the address to listen on; 0.0.0.0 = every IPv4 interface
    port: int = 8000  # 0 = any free one; the address is printed
    served_model_name: tuple[str, ...] = ()  # the model's name for clients; may be given several times
    # who
    api_key: tuple[str, ...] = ()  # a key that clients must send; may be given several times
    allowed_origins: tuple[str, ...] = ()  # web pages of other hosts that may call (CORS); may be given several times
    ssl_certfile: str | None = None  # the TLS certificate, with its chain; makes the server speak https
    ssl_keyfile: str | None = None  # the certificate's private key
    # chats
    tool_call_parser: str | None = None  # how the model writes tool calls; by default its vocabulary tells
    reasoning_parser: str | None = None  # how the model marks its thoughts; by default its vocabulary tells
    # limits
    max_body_bytes: int = 32 << 20  # of a request
    h11_max_incomplete_event_size: int = 64 << 10  # bytes of a request's headers
    max_queued_requests: int = 1024  # prompts that may wait beside the running ones; more are answered 429
    max_prompts_per_request: int = 1024  # in one call of /v1/completions or /v1/embeddings
    max_stop_strings: int = 16  # of a request
    max_logit_bias: int = 1024  # entries of a request
    request_timeout: float = 1800.0  # seconds after which a request is given up
    header_timeout: float = 30.0  # seconds for a client to send a request's headers
    body_timeout: float = 60.0  # seconds for a client to send a request's body
    shutdown_timeout: float = 60.0  # seconds that open requests have to finish after SIGTERM

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "h11_max_incomplete_event_size", "max_prompts_per_request"):
            self._check(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("max_queued_requests", "max_stop_strings", "max_logit_bias"):
            self._check(name, getattr(self, name) >= 0, "must be at least 0")
        for name in ("request_timeout", "header_timeout", "body_timeout", "shutdown_timeout"):
            self._check(name, math.isfinite(getattr(self, name)) and getattr(self, name) > 0, "must be above 0")
        self._check("port", 0 <= self.port < 1 << 16, "must be a port, 0 to 65535")
        if "" in self.api_key:
            raise ConfigError("api_key: an empty key would let everyone in; leave the option out for that")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile: needs ssl_certfile too")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name}={getattr(self, name)!r}: {rule}")
