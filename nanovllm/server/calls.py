"""One HTTP request as logs, metrics and `usage` see it: numbers and reasons, never text."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    path: str
    request_id: str  # the client's own, or ours: told in the X-Request-Id header
    started: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    unique: str = field(default_factory=lambda: uuid.uuid4().hex)  # names it towards the engine, in any API's spelling
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0  # of these
    first_token_at: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    def log_line(self, status: int) -> str:
        now = time.monotonic()
        first = "" if self.first_token_at is None else f" ttft={self.first_token_at - self.started:.3f}s"
        return (
            f"request_id={self.request_id} path={self.path} status={status} prompt_tokens={self.num_prompt_tokens} "
            f"cached_tokens={self.num_cached_tokens} output_tokens={self.num_output_tokens} "
            f"finish={','.join(self.finish_reasons) or '-'}{first} total={now - self.started:.3f}s"
        )
