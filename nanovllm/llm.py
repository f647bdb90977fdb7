"""The front door: `LLM(model).generate(prompts)`, and chat, stream and beam search beside it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import RequestError
from nanovllm.outputs import BeamSearchOutput, RequestOutput
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.text.chat_template import Message
from nanovllm.text.prompts import Prompt, as_list, read_prompt

if TYPE_CHECKING:
    from nanovllm.engine.memory_plan import MemoryPlan


class LLM(LLMEngine):
    """A model, ready to generate. Use it as a context manager, or call `close()`, to give its memory back.

    with LLM() as llm:
        print(llm.generate("The capital of France is")[0]["text"])
    """

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, written out by the model's chat template."""
        prompts = self.render_chat(
            messages,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[dict[str, Any]]:
        """Conversations as prompts for `generate` or `stream`: their text and its token ids."""
        if self.tokenizer is None:
            raise RequestError("skip_tokenizer_init=True: a conversation needs the tokenizer and its chat template")
        if not messages:
            raise RequestError("messages: at least one message is needed")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = []
        for conversation in conversations:
            text = self.tokenizer.render_chat(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return prompts

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield outputs as they grow, each with all text so far; leaving the loop early aborts what is left."""
        names = self._add_all(prompts, sampling_params, stream=True)
        waiting = set(names)
        try:
            while waiting:
                for output in self._step_for(waiting):
                    if output.finished:
                        waiting.remove(output.request_id)
                    yield output
        finally:
            self.abort(waiting)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first."""
        from nanovllm.engine.beam_search import beam_search

        token_ids = [read_prompt(prompt, self.tokenizer)[1] for prompt in as_list(prompts)]
        return beam_search(self, token_ids, params, self._eos)

    @classmethod
    def plan(cls, model: str | Path | None = None, **options: Any) -> "MemoryPlan":
        """Print, and return, what loading this model would take, without loading it."""
        from nanovllm.engine.memory_plan import make_plan

        plan = make_plan(None if model is None else str(model), options)
        print(plan)
        return plan
