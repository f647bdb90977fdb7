"""Compare the speed with transformers, on the same weights in the same process.

`transformers`' generate pads a batch to its longest prompt and runs until its longest output is complete, so short
requests wait for long ones and padding is computed like text. This engine forms a new batch for each step instead. The
ratio of the two speeds shows the gain from that and from faster steps on this machine.

The speed of a machine varies by more than such differences, because of other programs and of heat. So both sides run
in turn (A B A B ...); each round gives a ratio, and the median of the ratios is the result. Both sides sample greedily,
ignore end-of-sequence tokens and use all cores. Only requested tokens count: what `transformers` computes beyond a
request's own length does not. The prefix cache is emptied before each run.

  batch     16 requests at once, prompts of 64 to 256 tokens, outputs of 64 to 128
  stream    a single request, a prompt of 128 tokens, an output of 128
  agreement fraction of output tokens before the first difference; below 1 is normal outside float32

On a CPU without bfloat16 arithmetic transformers runs a hundred times slower in bfloat16 than in float32;
--transformers-dtype sets its data type separately. With --random-weights no checkpoint is needed: both sides load
random weights of the model's shape (SmolLM2-135M's without --model). Needs the transformers package.
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
    parser.add_argument(
        "--rounds", type=count, default=3, metavar="N", help="Number of runs of each side. Default: %(default)s."
    )
    parser.add_argument(
        "--num-seqs", type=count, default=16, metavar="N", help="Number of requests in the batch. Default: 16."
    )
    lengths: dict[str, Any] = {"type": span, "metavar": "A:B"}
    parser.add_argument(
        "--input-len",
        default=(64, 256),
        help="Prompt lengths of the batch, drawn from A to B tokens. Default: 64:256.",
        **lengths,
    )
    parser.add_argument(
        "--output-len",
        default=(64, 128),
        help="Output lengths of the batch, drawn from A to B tokens. Default: 64:128.",
        **lengths,
    )
    parser.add_argument(
        "--stream-len",
        type=count,
        default=128,
        metavar="N",
        help="Prompt and output length of the stream, in tokens. Default: 128.",
    )
    parser.add_argument(
        "--transformers-dtype",
        choices=DTYPES,
        default="auto",
        help="Data type that transformers computes in. Default: auto, the same as nanovllm's.",
    )
    parser.add_argument(
        "--threads", type=count, metavar="N", help="Number of threads. Default: all cores that this process may use."
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="Use random weights of the model's shape on both sides."
    )


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    if importlib.util.find_spec("transformers") is None:
        raise NanoError("this comparison needs the transformers package: pip install transformers")
    from tempfile import TemporaryDirectory

    import torch

    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    with TemporaryDirectory() as scratch:
        folder, dtype = _same_weights(engine, Path(scratch), random=args.random_weights)
        theirs = _open_transformers(folder, dtype if args.transformers_dtype == "auto" else args.transformers_dtype)
        ours = _open_nanovllm(folder, engine)
    with ours as llm:
        facts = environment(llm) | {"model": "random weights" if args.random_weights else _name(engine)}
        cases = _workloads(args, llm)
        for workload in cases.values():  # warm-up
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
    """Fraction of tokens before each request's first difference: after it the two sides continue different texts."""
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


def _open_nanovllm(folder: Path, engine: dict[str, Any]) -> "LLM":
    from nanovllm import LLM

    return LLM(**{"device": "cpu", **engine, "model": str(folder), "skip_tokenizer_init": True})


def _open_transformers(folder: Path, dtype: str) -> Any:
    import torch

    transformers = _quiet_transformers()
    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True
    )
    model, account = opened
    if account["missing_keys"]:
        raise CheckpointError(f"transformers found no weights for {sorted(account['missing_keys'])[:8]}")
    model.generation_config.eos_token_id = None  # always generate the requested length
    model.generation_config.pad_token_id = 0
    return model.eval()


def _quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# --- the same weights for both ----------------------------------------------------------------------------------------


def _same_weights(engine: dict[str, Any], scratch: Path, *, random: bool) -> tuple[Path, str]:
    """A folder that both sides can load (the model's own, or one written to `scratch`), and nanovllm's data type."""
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
    from nanovllm.utils.default_model import DEFAULT_MODEL

    return Path(engine.get("model", DEFAULT_MODEL)).name
