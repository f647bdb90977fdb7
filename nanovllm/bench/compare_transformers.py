"""How much faster than transformers, on the same weights in the same process.

The yardstick everyone has at hand is `transformers`' generate: it pads a batch to its longest prompt and runs until its
longest answer is done, so short requests wait for long ones and padding is computed like text. An engine batches what
is there at each step instead. The ratio of the two says what that, and a leaner step, is worth on this machine.

A machine's speed drifts by more than such differences: other programs, heat. So both run in turn (A B A B ...), each
round gives a ratio, and the median of the ratios is the result. Both are greedy, ignore end-of-sequence and use all
cores. Only tokens that were asked for count: what `transformers` computes beyond a request's own length does not.
The prefix cache is emptied before each run.

  batch     16 requests at once, 64 to 256 tokens in, 64 to 128 out
  stream    a single request, 128 tokens in, 128 out
  agreement the share of output tokens up to the first difference; below 1 is normal outside float32

A CPU without bfloat16 arithmetic runs transformers in bfloat16 a hundred times slower than in float32;
--transformers-dtype chooses its type separately. --random-weights needs no weights on this machine: random ones of the
named model's shape (SmolLM2-135M's if none is named) serve both sides. Needs the transformers package.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count, span
from nanovllm.bench.report import Report, Row, environment, medians_of, peak_memory
from nanovllm.bench.shapes import shape_folder
from nanovllm.config import DTYPES
from nanovllm.errors import CheckpointError, NanoError

if TYPE_CHECKING:
    import torch

    from nanovllm.bench.workload import Workload
    from nanovllm.llm import LLM

DEFAULT_SHAPE = "smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="runs of each; default: %(default)s")
    parser.add_argument("--num-seqs", type=count, default=16, metavar="N", help="requests in the batch; default: 16")
    lengths: dict[str, Any] = {"type": span, "metavar": "A:B"}
    parser.add_argument("--input-len", default=(64, 256), help="prompts of the batch; default: 64:256", **lengths)
    parser.add_argument("--output-len", default=(64, 128), help="answers of the batch; default: 64:128", **lengths)
    parser.add_argument(
        "--stream-len", type=count, default=128, metavar="N", help="tokens in, and out, of the stream; default: 128"
    )
    parser.add_argument(
        "--transformers-dtype", choices=DTYPES, default="auto", help="default: auto, the same as nanovllm's"
    )
    parser.add_argument("--threads", type=count, metavar="N", help="default: all cores this process may use")
    parser.add_argument("--random-weights", action="store_true", help="random weights of the model's shape for both")


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    if importlib.util.find_spec("transformers") is None:
        raise NanoError("this comparison needs the transformers package: pip install transformers")
    from tempfile import TemporaryDirectory

    import torch

    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    with TemporaryDirectory() as scratch:
        folder, dtype = _same_weights(engine, Path(scratch), random=args.random_weights)
        theirs = _open_transformers(folder, dtype if args.transformers_dtype == "auto" else args.transformers_dtype)
        ours = _open_nanovllm(folder, dtype, engine)
    with ours as llm:
        facts = environment(llm) | {"model": "random weights" if args.random_weights else _name(engine)}
        cases = _workloads(args, llm)
        for workload in cases.values():  # what happens only once is not measured
            _run_nanovllm(llm, workload.first_tokens(2))
            _run_transformers(theirs, workload.first_tokens(2))
        rows = [
            {"case": case, "round": str(number), **_compare(llm, theirs, workload)}
            for number in range(1, args.rounds + 1)
            for case, workload in cases.items()
        ]
    settings = {"transformers_dtype": str(theirs.dtype).removeprefix("torch."), "rounds": args.rounds, **peak_memory()}
    medians = [
        {"case": case, "round": "median", **medians_of([row for row in rows if row["case"] == case])} for case in cases
    ]
    return Report("compare-transformers", facts, settings, rows + medians)


def _workloads(args: argparse.Namespace, llm: "LLM") -> dict[str, "Workload"]:
    from nanovllm.bench.workload import make_workload

    stream_len = (args.stream_len, args.stream_len)
    shapes = {"batch": (args.num_seqs, args.input_len, args.output_len), "stream": (1, stream_len, stream_len)}
    cases = {}
    for case, (num_seqs, input_len, output_len) in shapes.items():
        cases[case] = make_workload(
            num_seqs=num_seqs,
            input_len=input_len,
            output_len=output_len,
            seed=llm.config.seed,
            vocab_size=llm.model_config.vocab_size,
            temperature=0.0,
        )
        cases[case].check_fits(llm.max_model_len)
    return cases


def _compare(llm: "LLM", theirs: Any, workload: "Workload") -> Row:
    ours_run = _timed(lambda: _run_nanovllm(llm, workload))
    their_run = _timed(lambda: _run_transformers(theirs, workload))
    return {
        "nanovllm_tokens_per_second": workload.num_output_tokens / ours_run.seconds,
        "transformers_tokens_per_second": workload.num_output_tokens / their_run.seconds,
        "ratio": their_run.seconds / ours_run.seconds,
        "agreement": _agreement(ours_run.token_ids, their_run.token_ids),
    }


@dataclass(frozen=True)
class Run:
    seconds: float
    token_ids: list[list[int]]


def _timed(generate: Callable[[], list[list[int]]]) -> Run:
    begin = time.perf_counter()
    token_ids = generate()
    return Run(time.perf_counter() - begin, token_ids)


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens before each request's first difference: after it the two continue different texts."""
    equal = 0
    for a, b in zip(ours, theirs, strict=True):
        differences = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        equal += differences[0] if differences else len(a)
    return equal / sum(map(len, ours))


# --- the two sides ----------------------------------------------------------------------------------------------------


def _run_nanovllm(llm: "LLM", workload: "Workload") -> list[list[int]]:
    llm.reset_prefix_cache()
    outputs = llm.generate(workload.prompts, workload.params, use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def _run_transformers(model: Any, workload: "Workload") -> list[list[int]]:
    import torch

    input_ids, mask = _pad_left(workload.prompts)  # [batch, longest]
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(workload.output_lens),
            do_sample=False,
        )  # [batch, longest + new]
    answers = tokens[:, input_ids.shape[1] :].tolist()
    return [answer[:wanted] for answer, wanted in zip(answers, workload.output_lens, strict=True)]


def _pad_left(prompts: list[list[int]]) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    input_ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    return input_ids, mask


def _open_nanovllm(folder: Path, dtype: str, engine: dict[str, Any]) -> "LLM":
    from nanovllm import LLM

    return LLM(**{"device": "cpu", **engine, "model": str(folder), "dtype": dtype, "skip_tokenizer_init": True})


def _open_transformers(folder: Path, dtype: str) -> Any:
    import torch

    transformers = _quiet_transformers()
    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True
    )
    model, account = opened
    if account["missing_keys"]:
        raise CheckpointError(f"transformers found no weights for {sorted(account['missing_keys'])[:8]}")
    model.generation_config.eos_token_id = None  # run to the asked-for length
    model.generation_config.pad_token_id = 0
    return model.eval()


def _quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# --- the same weights for both ----------------------------------------------------------------------------------------


def _same_weights(engine: dict[str, Any], scratch: Path, *, random: bool) -> tuple[Path, str]:
    """A folder that both can read, and the type nanovllm computes in: the model's own, or one written to `scratch`."""
    import torch

    from nanovllm.models.registry import describe
    from nanovllm.runner.device import resolve_dtype
    from nanovllm.utils.hub import resolve_model

    path = shape_folder(DEFAULT_SHAPE) if random and "model" not in engine else resolve_model(engine.get("model"))
    own_dtype = describe(path).config.dtype
    dtype = resolve_dtype(engine.get("dtype", "auto"), own_dtype, torch.device(engine.get("device", "cpu")))
    if random:
        _write_random(_read_config(path), scratch, dtype, engine.get("seed", 0))
    elif path.is_file():
        _write_dequantized(path, scratch, dtype)
    else:
        scratch = path
    return scratch, str(dtype).removeprefix("torch.")


def _read_config(path: Path) -> dict[str, Any]:
    from nanovllm.checkpoint.gguf import GGUFFile
    from nanovllm.checkpoint.json_file import read_json

    if path.is_dir():
        return read_json(path / "config.json")
    with GGUFFile(path) as file:
        return file.hf_config()


def _write_random(config: dict[str, Any], folder: Path, dtype: "torch.dtype", seed: int) -> None:
    import torch

    transformers = _quiet_transformers()
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype).save_pretrained(folder)


def _write_dequantized(path: Path, folder: Path, dtype: "torch.dtype") -> None:
    from safetensors.torch import save_file

    from nanovllm.checkpoint.loader import checkpoint_tensors

    (folder / "config.json").write_text(json.dumps(_read_config(path)))
    tensors = {name: stored.read() for name, stored in checkpoint_tensors(path, "gguf", dtype)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _name(engine: dict[str, Any]) -> str:
    from nanovllm.utils.hub import DEFAULT_MODEL

    return Path(engine.get("model", DEFAULT_MODEL)).name
