"""Negative log-likelihood of texts: what quantized weights or an 8-bit KV cache cost in quality.

The texts are cut into pieces of --piece-len tokens. Each piece is computed as a prompt of its own, and every token but
its first is scored with the probability that the model gives it after the tokens before. Compare two runs over the same
texts, one of them with the option whose cost you want to know. No text is generated.

  tokens                   tokens that were scored
  negative log-likelihood  its mean per token: 0 would be certainty
  perplexity               e to the power of that
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

from nanovllm.bench.arguments import count
from nanovllm.bench.report import FourDecimals, Report, Row, environment
from nanovllm.errors import ConfigError

PIECE_LEN = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--texts", type=Path, nargs="+", required=True, metavar="FILE", help="Text files in UTF-8 to score."
    )
    parser.add_argument(
        "--piece-len",
        type=count,
        metavar="N",
        help=f"Tokens per piece. Default: {PIECE_LEN:,}, or less if the model allows less.",
    )


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    from nanovllm import LLM, SamplingParams

    texts = [_read(path) for path in args.texts]
    with LLM(**engine) as llm:
        if llm.tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True: texts cannot be scored without a tokenizer")
        most = llm.max_model_len - 1  # a request needs room for one output token
        piece_len = min(PIECE_LEN, most) if args.piece_len is None else args.piece_len
        if not 2 <= piece_len <= most:
            raise ConfigError(f"piece_len={piece_len}: must be from 2 to {most:,}, max_model_len less one output token")
        encoded = llm.tokenizer.encode_batch(texts)
        pieces = [ids[at : at + piece_len] for ids in encoded for at in range(0, len(ids), piece_len)]
        pieces = [piece for piece in pieces if len(piece) > 1]
        if not pieces:
            raise ConfigError("texts: they have fewer than two tokens")
        begin = time.perf_counter()
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate(pieces, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        facts = environment(llm)
    logprobs: list[float] = []
    for piece, output in zip(pieces, outputs, strict=True):
        found = output.prompt_logprobs
        assert found is not None
        logprobs += [entry[token].logprob for token, entry in zip(piece, found, strict=True) if entry is not None]
    mean = -math.fsum(logprobs) / len(logprobs)
    row: Row = {
        "tokens": len(logprobs),
        "negative_log_likelihood": FourDecimals(mean),
        "perplexity": FourDecimals(math.exp(mean)),
        "tokens_per_second": len(logprobs) / seconds,
    }
    weights = {"quantization": engine["quantization"]} if engine.get("quantization") else {}
    return Report("perplexity", {**facts, **weights}, {"texts": len(texts), "piece_len": piece_len}, [row])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"texts={str(path)!r}: {error}") from error
