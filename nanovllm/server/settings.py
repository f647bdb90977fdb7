"""All options of the server, under vLLM's names where vLLM has the option."""

import math
from dataclasses import dataclass

from nanovllm.errors import ConfigError
from nanovllm.option import option


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The options of the server: address, access, parsers of chats, and limits on requests."""

    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 listens on every IPv4 interface.")
    port: int = option(8000, "Port to listen on. 0 picks a free port; the address is printed.")
    served_model_name: tuple[str, ...] = option(
        (), "Model name that clients use. May be given several times. Without it, the model's own name is used."
    )
    # access
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send. May be given several times. Without it, no key is needed."
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Origin of web pages on other hosts that may call the server (CORS). May be given several times."
    )
    ssl_certfile: str | None = option(
        None, "File with the TLS certificate and its chain. With it, the server speaks HTTPS."
    )
    ssl_keyfile: str | None = option(None, "File with the private key of the TLS certificate.")
    # chats
    tool_call_parser: str | None = option(
        None,
        "Format in which the model writes tool calls: functiongemma, gemma4, glm45, glm47, harmony, hermes, lfm2, "
        "llama3_json, mistral, qwen3_coder or qwen3_xml. Without it, the format follows from the chat template or the "
        "vocabulary.",
    )
    reasoning_parser: str | None = option(
        None,
        "Format in which the model marks its reasoning: deepseek_r1, gemma4, glm45, glm47, harmony, mistral or qwen3. "
        "Without it, the format follows from the vocabulary.",
    )
    # limits
    max_body_bytes: int = option(32 << 20, "Maximum size of a request's body in bytes.")
    h11_max_incomplete_event_size: int = option(64 << 10, "Maximum size of a request's headers in bytes.")
    max_queued_requests: int = option(
        1024,
        "Maximum number of prompts that wait in addition to the running ones. Further requests are answered with 429.",
    )
    max_prompts_per_request: int = option(
        1024, "Maximum number of prompts in one call of /v1/completions or /v1/embeddings."
    )
    max_stop_strings: int = option(16, "Maximum number of stop strings of a request.")
    max_logit_bias: int = option(1024, "Maximum number of logit_bias entries of a request.")
    request_timeout: float = option(1800.0, "Seconds after which a request that is still running is aborted.")
    header_timeout: float = option(30.0, "Seconds that a client has to send a request's headers.")
    body_timeout: float = option(60.0, "Seconds that a client has to send a request's body.")
    keep_alive_timeout: float = option(
        620.0,
        "Seconds that an idle connection stays open. Should exceed the time that clients keep it in their pools.",
    )
    shutdown_timeout: float = option(60.0, "Seconds that open requests have to finish after SIGTERM.")

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "h11_max_incomplete_event_size", "max_prompts_per_request"):
            self._check(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("max_queued_requests", "max_stop_strings", "max_logit_bias"):
            self._check(name, getattr(self, name) >= 0, "must be at least 0")
        timeouts = ("request_timeout", "header_timeout", "body_timeout", "keep_alive_timeout", "shutdown_timeout")
        for name in timeouts:
            self._check(name, math.isfinite(getattr(self, name)) and getattr(self, name) > 0, "must be above 0")
        self._check("port", 0 <= self.port < 1 << 16, "must be a port, 0 to 65535")
        if "" in self.api_key:
            raise ConfigError("api_key: an empty key is not accepted; leave the option out to require no key")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile: needs ssl_certfile as well")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name}={getattr(self, name)!r}: {rule}")
