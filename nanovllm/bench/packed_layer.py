"""Decode steps with and without the kernel that computes everything between two attentions (`packed_layer`).

One process starts an engine for each way to run it, all with random 4-bit weights of one shape and fewer layers, and
measures their steps in turn, so that a change of the machine's speed reaches all of them. Engines share the GPU, but
only one runs at a time.

  off              the linears' own kernels
  on               the kernel as it is used: launched cooperatively, and before the kernel before it has ended
  not cooperative  to see what that costs; no engine may be used so, because two of them could wait for each other

For each way it prints the seconds of the start, the milliseconds to the first token of the first prompt and of a later
one, how many of some greedy tokens are those of the first way, and the milliseconds per token (medians of rounds).

    python -m nanovllm.bench.packed_layer --seconds 40
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from nanovllm.bench.decoding import decoding
from nanovllm.bench.shapes import shape_folder

if TYPE_CHECKING:
    from nanovllm.llm import LLM

WAYS = ("off", "on", "not cooperative")
INPUT_LEN = 960
NUM_STEPS = 48
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "quantization": "int4",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "num_kv_cache_blocks": 512,
    "enable_prefix_caching": False,
}


@contextmanager
def run_as(way: str) -> Iterator[None]:
    """A context in which engines start and run with this variant."""
    from nanovllm.kernels.linear import packed_layer
    from nanovllm.layers import joined_layers

    usual = packed_layer.launch

    def launch(*args: Any, **options: Any) -> None:
        usual(*args, **options | {"launch_cooperative_grid": False})

    with ExitStack() as changed:
        if way == "off":
            changed.enter_context(patch.object(joined_layers, "joins_layers", lambda *cases: False))
        if way == "not cooperative":
            changed.enter_context(patch.object(packed_layer, "launch", launch))
        yield


def write_shape(folder: Path, name: str, *, layers: int, vocabulary: int) -> None:
    """Write the config of a model shape, with another number of layers and another vocabulary size."""
    config = json.loads((shape_folder(name) / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(config))


def prompt(length: int) -> list[int]:
    return [7 * token % 251 for token in range(1, length + 1)]


def first_token_ms(llm: "LLM") -> float:
    from nanovllm import SamplingParams

    begin = time.perf_counter()
    llm.generate([prompt(INPUT_LEN)], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return (time.perf_counter() - begin) * 1e3


def greedy_tokens(llm: "LLM") -> list[int]:
    """The tokens generated for eight prompts of 9 to 16 tokens that decode as one batch."""
    from nanovllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([prompt(length) for length in range(9, 17)], params, use_tqdm=False)
    return [token for output in outputs for token in output["token_ids"]]


def step_ms(llm: "LLM", batch_size: int) -> float:
    with decoding(llm, batch_size, INPUT_LEN, NUM_STEPS):
        begin = time.perf_counter()
        for _ in range(NUM_STEPS):
            llm.step()
        return (time.perf_counter() - begin) / NUM_STEPS * 1e3


def measure(
    ways: Sequence[str],
    start: Callable[[], "LLM"],
    batch_sizes: Sequence[int],
    *,
    until: float,
    say: Callable[[str], None] = print,
) -> None:
    """Start an engine per variant, then measure them in turn, at least once, until `time.monotonic()` is `until`."""
    engines: dict[str, LLM] = {}
    expected: list[int] = []
    for way in ways:
        begin = time.perf_counter()
        try:
            with run_as(way):
                engines[way] = start()
                seconds = time.perf_counter() - begin
                first, later = first_token_ms(engines[way]), first_token_ms(engines[way])
                tokens = greedy_tokens(engines[way])
        except RuntimeError as error:  # of CUDA: other ways may still be possible
            engines.pop(way, None)
            say(f"{way:16} {error}")
            continue
        expected = expected or tokens
        same = sum(token == other for token, other in zip(tokens, expected, strict=True))
        say(
            f"{way:16} start {seconds:6.2f} s, first token {first:8.1f} ms, later {later:6.1f} ms, "
            f"{same} of {len(tokens)} tokens as {next(iter(engines))}"
        )
    if not engines:
        return
    ways = list(engines)
    found: dict[tuple[str, int], list[float]] = {(way, size): [] for way in ways for size in batch_sizes}
    while not all(found.values()) or time.monotonic() < until:
        for size in batch_sizes:
            for way in ways:
                with run_as(way):
                    found[way, size].append(step_ms(engines[way], size))
    num_rounds, sizes = len(next(iter(found.values()))), ", ".join(map(str, batch_sizes))
    say(f"ms/token, medians of {num_rounds} rounds, at {sizes} sequences")
    for way in ways:
        middles = [(median(found[way, size]), median(found[ways[0], size])) for size in batch_sizes]
        say(f"{way:16}" + "".join(f" {own:8.4f} ({own - first:+.4f})" for own, first in middles))
    for llm in engines.values():
        llm.close()


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    from nanovllm import LLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--model-shape", default="qwen3-8b", metavar="NAME")
    parser.add_argument("--layers", type=int, default=12, metavar="N")
    parser.add_argument("--vocabulary", type=int, default=32_768, metavar="N")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--seconds", type=float, default=90.0, help="no new round is begun after this time")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), options.model_shape, layers=options.layers, vocabulary=options.vocabulary)
        measure(options.ways, lambda: LLM(folder, **ENGINE), options.batch_sizes, until=until)


if __name__ == "__main__":
    main()
