"""What a person sees: answers on stdout as they grow, everything else on stderr."""

import sys
from collections.abc import Iterable

from nanovllm.outputs import RequestOutput


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_growing(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Print an answer as it comes and end its line, also when it is broken off; returns the last output."""
    printed, last = 0, None
    try:
        for last in outputs:
            print(last["text"][printed:], end="", flush=True)
            printed = len(last["text"])
    finally:
        if last is not None:
            print(flush=True)
    assert last is not None, "a stream ends with a finished output"
    return last


def note_cut(output: RequestOutput) -> None:
    """Say so if the answer ended because a limit did."""
    if output.outputs[0].finish_reason == "length":
        note(f"[cut off after {len(output['token_ids'])} tokens; --max-tokens and --max-model-len set the limit]")


def note_speed(output: RequestOutput) -> None:
    """How fast an answer came, for people only: a script's stderr stays quiet."""
    times, num_tokens = output.metrics, len(output["token_ids"])
    if not sys.stderr.isatty() or times.first_token_time is None or times.finished_time is None:
        return
    seconds = times.finished_time - times.first_token_time
    rate = f", then {(num_tokens - 1) / seconds:.1f} tokens/s" if num_tokens > 1 and seconds > 0 else ""
    note(f"[{num_tokens} tokens; the first after {times.first_token_time - times.arrival_time:.2f} s{rate}]")
