"""An engine without a model: it generates the text that a test sets, when the test allows it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanovllm.bench.tiny_model import NO_MODEL
from nanovllm.config import Config
from nanovllm.engine.deltas import Delta, TokenScores
from nanovllm.errors import EngineClosedError, EngineError, RequestError
from nanovllm.remote.messages import EngineStats, EngineView, RequestView, StepView
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.tokenizer import Tokenizer

TOKENIZER = Path(__file__).parent.parent / "data" / "tokenizer"
VOCAB_SIZE = 600
MODEL_CONFIG = replace(NO_MODEL, vocab_size=VOCAB_SIZE, hidden_size=3, max_position=512, eos_token_ids=(2,))
STATS = EngineStats(1, 2, 10, 3, 5, 7, 100, 40, 1000, 500)


class FakeEngine:
    """Completes each prompt with `says`, or with the prompt's own text, until EOS or max_tokens."""

    def __init__(self, says: str | None = None, *, max_model_len: int = 512, max_num_seqs: int = 4) -> None:
        self.tokenizer: Tokenizer | None = Tokenizer.from_dir(TOKENIZER)
        self.config = Config(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.model_config = MODEL_CONFIG
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.model_name = "fake"
        self.says = says
        self.refuses: str | None = None
        self.ill: str | None = None
        self.fails_after: int | None = None  # number of deltas per completion before it fails
        self.ends_with = "stop"
        self.cached = 0
        self.gate: asyncio.Event | None = None  # deltas wait until it is set
        self.holds_after = 0  # number of deltas that do not wait for the gate
        self.seen: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.embedded: list[list[int]] = []
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.closed = False
        self.death = asyncio.Event()

    async def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: Any = None,
    ) -> AsyncGenerator[Delta, None]:
        self.seen.append((token_ids, params, {"priority": priority, "cache_salt": cache_salt}))
        if self.refuses is not None:
            raise RequestError(self.refuses)
        self.open.add(request_id)
        finished = False
        try:
            for number, delta in enumerate(self._deltas(token_ids, params, request_id)):
                await self._pass_gate(number)
                if self.fails_after is not None and number >= self.fails_after:
                    raise EngineClosedError("the engine died at /secret/path")
                yield delta
            finished = True
        finally:
            self.open.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    async def _pass_gate(self, number: int) -> None:
        if self.gate is None or number < self.holds_after:
            await asyncio.sleep(0)
            return
        gate, death = asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(self.death.wait())
        try:
            await asyncio.wait({gate, death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gate.cancel()
            death.cancel()
        if self.death.is_set():
            raise EngineClosedError("the engine died at /secret/path")

    def _deltas(self, token_ids: list[int], params: SamplingParams, request_id: str) -> list[Delta]:
        tokenizer = self.tokenizer
        answer = list(token_ids) if self.says is None or tokenizer is None else tokenizer.encode(self.says)
        limit = self.max_model_len - len(token_ids)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        by_length = limit <= len(answer)
        answer = answer[:limit]
        texts = self._texts(answer, token_ids, params)
        deltas = []
        for position, (token_id, text) in enumerate(zip(answer, texts, strict=True)):
            for index in range(params.n):
                scores = None if params.logprobs is None else [self._scores(token_id, params.logprobs)]
                delta = Delta(request_id, index, text, [token_id], scores, num_cached_tokens=self.cached)
                if position == index == 0:
                    delta.queue_seconds = 0.125
                if position == index == 0 and params.prompt_logprobs is not None:
                    rest = [self._scores(token, params.prompt_logprobs) for token in token_ids[1:]]
                    delta.prompt_logprobs = [None, *rest]
                deltas.append(delta)
        for delta in deltas[-params.n :]:
            delta.finish_reason = "length" if by_length else self.ends_with
        return deltas

    def _texts(self, answer: list[int], prompt: list[int], params: SamplingParams) -> list[str]:
        """The text that each token of the answer adds: only complete characters."""
        if self.tokenizer is None:
            return [""] * len(answer)
        detokenizer = Detokenizer(
            self.tokenizer, prompt_token_ids=prompt, skip_special_tokens=params.skip_special_tokens
        )
        texts = []
        for position, token_id in enumerate(answer):
            detokenizer.append([token_id])
            if position == len(answer) - 1:
                detokenizer.finish()
            texts.append(detokenizer.take_new())
        return texts

    def _scores(self, token_id: int, num_top: int) -> TokenScores:
        token_ids = [token_id, *range(20, 20 + num_top)]
        logprobs = [-0.25, *(-1.0 - number for number in range(num_top))]
        tokens = [] if self.tokenizer is None else [self.tokenizer.decode_token(token) for token in token_ids]
        return TokenScores(token_ids, logprobs, 1, tokens)

    async def check_health(self) -> None:
        if self.ill is not None:
            raise EngineError(self.ill)

    async def stats(self) -> EngineStats:
        return STATS

    async def view(self) -> AsyncGenerator[EngineView, None]:
        yield EngineView(
            STATS, bytes([0, 1, 2, 3]), [0, 0, 1, 1], [RequestView("a", 3, 2, 5, 1)], [], [StepView(0.5, 3, 1, 2.0)]
        )
        await self.death.wait()

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        if self.refuses is not None:
            raise RequestError(self.refuses)
        self.embedded.append(token_ids)
        return [0.6 if pooling == "mean" else 0.8, 0.8, float(len(token_ids))]

    async def close(self) -> None:
        self.closed = True
