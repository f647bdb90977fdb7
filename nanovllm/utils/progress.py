"""A progress bar for `generate`: finished requests, and the tokens/s of both phases."""

import time

from tqdm import tqdm

from nanovllm.outputs import RequestOutput
from nanovllm.plan import StepPlan


class Progress:
    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, desc="Generating", unit="req", dynamic_ncols=True)
        self._tokens = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._last = time.perf_counter()

    def close(self) -> None:
        self._bar.close()

    def saw(self, plan: StepPlan | None, outputs: list[RequestOutput]) -> None:
        now = time.perf_counter()
        if plan is not None:
            phase = "prefill" if plan.num_prompt_tokens else "decode"
            self._tokens[phase] += plan.num_tokens
            self._seconds[phase] += now - self._last
            self._bar.set_postfix_str(
                ", ".join(
                    f"{p} {self._tokens[p] / self._seconds[p]:.0f} tok/s" for p in self._tokens if self._seconds[p]
                ),
                refresh=False,
            )
        self._last = now
        self._bar.update(sum(output.finished for output in outputs))
