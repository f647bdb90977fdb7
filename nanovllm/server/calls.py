"""What is recorded of one HTTP request for logs, metrics and `usage`. It contains no text of prompts or completions."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    """The ids, times and token counts of one HTTP request."""

    path: str
    request_id: str  # from the client's X-Request-Id header, else generated; returned in that header
    started: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    internal_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # for the engine, and in the ids of responses
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0  # included in num_output_tokens
    first_token_at: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def usage(self) -> dict[str, Any]:
        """The token counts in the format of the OpenAI API."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    def usage_of_prompt(self) -> dict[str, Any]:
        """The token counts before the first token of the completions."""
        return {
            **self.usage(),
            "completion_tokens": 0,
            "total_tokens": self.num_prompt_tokens,
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def log_line(self, status: int) -> str:
        now = time.monotonic()
        first = "" if self.first_token_at is None else f" ttft={self.first_token_at - self.started:.3f}s"
        return (
            f"request_id={self.request_id} path={self.path} status={status} prompt_tokens={self.num_prompt_tokens} "
            f"cached_tokens={self.num_cached_tokens} output_tokens={self.num_output_tokens} "
            f"finish={','.join(self.finish_reasons) or '-'}{first} total={now - self.started:.3f}s"
        )
