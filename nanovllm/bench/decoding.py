"""A batch all of whose sequences decode, for benchmarks of decode steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanovllm.bench.workload import make_workload
from nanovllm.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from nanovllm.llm import LLM

SETTLING_STEPS = 8


@contextmanager
def decoding(llm: "LLM", batch_size: int, input_len: int, num_steps: int) -> Iterator[None]:
    """A batch all of whose sequences decode for `num_steps` steps, after some for settling; aborted at the end."""
    num_prefill_steps = -(-batch_size * input_len // max(1, llm.config.max_num_batched_tokens - batch_size)) + 1
    output_len = num_prefill_steps + SETTLING_STEPS + num_steps + 4
    workload = make_workload(
        num_seqs=batch_size,
        input_len=(input_len, input_len),
        output_len=(output_len, output_len),
        seed=llm.config.seed,
        vocab_size=llm.model_config.vocab_size,
    )
    workload.check_fits(llm.max_model_len)
    llm.reset_prefix_cache()
    names = [llm.add_request(prompt, params) for prompt, params in zip(workload.prompts, workload.params, strict=True)]
    try:
        _until_all_decode(llm, batch_size)
        for _ in range(SETTLING_STEPS):
            llm.step()
        yield
        still_running = llm.num_unfinished_requests
    finally:
        llm.abort(names)
        llm.step()  # collects the step that was still running
    if still_running < batch_size:
        raise EngineError(
            f"only {still_running} of {batch_size} sequences were still decoding at the end of the recording"
        )


def _until_all_decode(llm: "LLM", batch_size: int) -> None:
    """Run steps until one decodes all sequences and computes no prompt."""
    while not llm.is_finished():
        llm.step()
        plan = llm.llm_engine.last_plan
        if plan is not None and not plan.row_steps and len(plan.decode_rows) == batch_size:
            return
    raise ConfigError(
        f"max_num_seqs={llm.config.max_num_seqs}: {batch_size} sequences never decode in one step; raise it, give the "
        "KV cache more memory, or profile smaller batches"
    )
