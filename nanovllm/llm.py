"""The front door: `LLM(model).generate(prompts)`, and chat, stream, beam search and embeddings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, as_list, one_each, read_prompt
from nanovllm.utils.collector import collector_calmed

if TYPE_CHECKING:
    from nanovllm.engine.beam_search import BeamSearchOutput, BeamSearchParams
    from nanovllm.engine.memory_plan import MemoryPlan
    from nanovllm.text.chat_template import Message


class LLM:
    """A model, ready to generate. Use it as a context manager, or call `close()`, to free its memory.

    with LLM() as llm:
        print(llm.generate("The capital of France is")[0]["text"])

    `model` is a folder, a GGUF file or a name on the Hugging Face hub; the options are the fields of `Config`.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.llm_engine = LLMEngine(model, **options)
        self.config = self.llm_engine.config
        self.model_config = self.llm_engine.model_config
        self.max_model_len = self.llm_engine.max_model_len
        self.tokenizer = self.llm_engine.tokenizer
        self.startup_seconds = self.llm_engine.startup_seconds  # seconds of each phase of the start

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory. Running requests are dropped. Closing twice is allowed."""
        self.llm_engine.close()

    # --- whole answers ------------------------------------------------------------------------------------------------

    @collector_calmed()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of the prompts. A bar shows prefill and decode tokens/s."""
        names = self.add_requests(prompts, sampling_params, priority=priority)
        own = set(names)
        done: dict[str, RequestOutput] = {}
        progress = None
        try:
            if use_tqdm:
                from nanovllm.utils.progress import Progress

                progress = Progress(len(names))
            while len(done) < len(names):
                outputs = self.llm_engine.step(own)
                done |= {output.request_id: output for output in outputs}
                if progress is not None:
                    progress.saw(self.llm_engine.last_plan, outputs)
        finally:
            self.abort(names)  # what is left after an error or Ctrl-C
            if progress is not None:
                progress.close()
        return [done[name] for name in names]

    def chat(
        self,
        messages: "Sequence[Message] | Sequence[Sequence[Message]]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, written out by the chat template with the options of `render_chat`."""
        return self.generate(self.render_chat(messages, **template_options), sampling_params, use_tqdm)

    def render_chat(
        self,
        messages: "Sequence[Message] | Sequence[Sequence[Message]]",
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[dict[str, Any]]:
        """Conversations as prompts for `generate` or `stream`: their text and its token ids."""
        from nanovllm.text.chat_template import chat_prompts

        return chat_prompts(
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: "BeamSearchParams") -> "list[BeamSearchOutput]":
        """The `beam_width` best continuations of each prompt, best first."""
        from nanovllm.engine.beam_search import beam_search

        return beam_search(
            [read_prompt(prompt, self.tokenizer)[1] for prompt in as_list(prompts)],
            params,
            generate=lambda prompts, params: self.generate(prompts, params, use_tqdm=False),
            tokenizer=self.tokenizer,
            max_model_len=self.max_model_len,
            eos_token_ids=self.llm_engine.eos_token_ids,
        )

    def embed(self, token_ids: list[int], pooling: str = "last") -> list[float]:
        """The hidden state of the last token ("last") or the mean of all ("mean"), scaled to length 1."""
        from nanovllm.engine.pooling import embed

        return embed(self.llm_engine, token_ids, pooling)

    # --- answers as they grow -----------------------------------------------------------------------------------------

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield outputs as they grow, each with all text so far; leaving the loop early aborts what is left."""
        waiting = set(self.add_requests(prompts, sampling_params, stream=True))
        try:
            while waiting:
                for output in self.llm_engine.step(waiting):
                    if output.finished:
                        waiting.remove(output.request_id)
                    yield output
        finally:
            self.abort(waiting)

    # --- step by step -------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
    ) -> str:
        """Queue a request and return its id. `stream=True` makes `step` report it whenever it has grown."""
        return self.llm_engine.add_request(
            prompt, sampling_params, request_id=request_id, priority=priority, stream=stream
        )

    def add_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        stream: bool = False,
    ) -> list[str]:
        """Queue all prompts or, if one is refused, none; returns their ids. If the device is idle and works while the
        host does, the first step is launched as soon as there are tokens enough for it, not after the last prompt.
        """
        engine = self.llm_engine
        engine.check_open()
        items = as_list(prompts)
        params = one_each("sampling_params", sampling_params or SamplingParams(), SamplingParams, len(items))
        priorities = one_each("priority", priority, int, len(items))
        early = engine.overlaps and not engine.has_work and isinstance(priority, int)
        room = self.config.max_num_batched_tokens if early else 0  # tokens that the first step still has room for
        names: list[str] = []
        try:
            for item, param, rank in zip(items, params, priorities, strict=True):
                names.append(engine.add_request(item, param, priority=rank, stream=stream))
                if room > 0:
                    room -= engine.scheduler.waiting[-1].num_tokens  # the newest one
                    if room <= 0:
                        engine.step(())
        except BaseException as error:
            self.abort(names)
            if isinstance(error, RequestError) and len(items) > 1:
                error.args = (f"prompt {len(names)}: {error}",)
            raise
        return names

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of requests that finished, and of streamed ones that grew."""
        return self.llm_engine.step()

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests without an output. Unknown and finished ones are ignored."""
        self.llm_engine.abort(request_id)

    def is_finished(self) -> bool:
        """Whether no request is unfinished and no output waits for a `step`."""
        return self.llm_engine.is_finished()

    @property
    def num_unfinished_requests(self) -> int:
        return self.llm_engine.num_unfinished_requests

    # --- the engine ---------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks; running requests keep theirs."""
        self.llm_engine.reset_prefix_cache()

    def check_health(self) -> None:
        """Raise EngineError if the engine cannot go on."""
        self.llm_engine.check_health()

    @classmethod
    def plan(cls, model: str | Path | None = None, **options: Any) -> "MemoryPlan":
        """Print, and return, what loading this model would take, without loading it."""
        from nanovllm.engine.memory_plan import make_plan

        plan = make_plan(None if model is None else str(model), options)
        print(plan)
        return plan
