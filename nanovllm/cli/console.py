"""Terminal output: answers go to stdout while they are generated, everything else to stderr."""

import sys
from collections.abc import Iterable

from nanovllm.outputs import RequestOutput


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_growing(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Print an answer while it is generated and return the last output. The line is ended even on an exception."""
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
    """Tell the user if the answer was cut off by a length limit."""
    if output.outputs[0].finish_reason == "length":
        note(f"[cut off after {len(output['token_ids'])} tokens; --max-tokens and --max-model-len set the limit]")


def note_speed(output: RequestOutput) -> None:
    """Print the speed of an answer if stderr is a terminal."""
    times, num_tokens = output.metrics, len(output["token_ids"])
    if not sys.stderr.isatty() or times.first_token_time is None or times.finished_time is None:
        return
    seconds = times.finished_time - times.first_token_time
    rate = f", then {(num_tokens - 1) / seconds:.1f} tokens/s" if num_tokens > 1 and seconds > 0 else ""
    note(f"[{num_tokens} tokens; first token after {times.first_token_time - times.arrival_time:.2f} s{rate}]")
