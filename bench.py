"""Runs the published workload through the public API: `python bench.py [MODEL]`.

This takes long on a CPU; `nanovllm bench throughput` measures more and can run a smaller workload.
"""

import sys
import time
from random import randint, seed

from nanovllm import LLM, SamplingParams

NUM_SEQS = 256


def main() -> None:
    seed(0)
    prompts = [[randint(0, 10000) for _ in range(randint(100, 1024))] for _ in range(NUM_SEQS)]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(100, 1024)) for _ in range(NUM_SEQS)]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        llm.generate("Warm up", SamplingParams(max_tokens=4), use_tqdm=False)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    print(f"{num_tokens:,} tokens in {seconds:.2f} s: {num_tokens / seconds:,.2f} tokens/s")


if __name__ == "__main__":
    main()
