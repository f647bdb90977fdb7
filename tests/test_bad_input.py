"""Invalid requests, options and checkpoints are refused with the right error and a message that says what and why."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.engine.consistency import check_scheduler
from nanovllm.errors import CheckpointError, ConfigError, ModelNotFoundError, NanoError, RequestError
from tests.helpers import (
    TEXT_MODEL,
    assert_greedy,
    copy_of,
    edit_config,
    greedy_params,
    model_dir,
    open_llm,
    prompt_of,
    scheduler_of,
)

NAN = float("nan")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(TEXT_MODEL, num_kv_cache_blocks=4) as llm:
        yield llm


def assert_goes_on(llm: LLM) -> None:
    """Assert that nothing of a refused request is left and that the next request runs."""
    assert llm.is_finished()
    check_scheduler(scheduler_of(llm))
    (output,) = llm.generate(prompt_of(4), greedy_params(3), use_tqdm=False)
    assert_greedy(TEXT_MODEL, prompt_of(4), output["token_ids"])


# --- requests ---------------------------------------------------------------------------------------------------------

PROMPTS: list[tuple[Any, str]] = [
    ("", "the prompt is empty"),
    ([[]], "the prompt is empty"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    ([5] * 256, "the prompt has 256 tokens, and max_model_len=256 must also hold at least one new token"),
    ([5, 600], "prompt_token_ids: token id 600 is outside the vocabulary of 600 tokens"),
    ([5, -1], "token id -1 is outside the vocabulary"),
    ([5, 2**32], "token id 4294967296 is outside the vocabulary"),
    ([5] * 61, "the prompt of 61 tokens and up to 5 new ones need 5 KV blocks of 16 tokens, and there are 4"),
    (5, "prompts must be a prompt or a list of prompts, not int"),
    (None, "prompts must be a prompt or a list of prompts, not NoneType"),
    ([None], "a prompt must be text or a list of token ids, not NoneType"),
    ([3.5], "a prompt must be text or a list of token ids, not float"),
    ([[1, "two"]], "a prompt must be text or a list of token ids"),
    ([[1, True]], "a prompt must be text or a list of token ids"),
    (b"bytes", "a prompt must be text or a list of token ids"),
    ({}, "a prompt must be text or a list of token ids, not NoneType"),
    (
        {"text": "x"},
        "a prompt has the unknown keys 'text'; known keys are 'prompt' or 'prompt_token_ids', and 'cache_salt'",
    ),
    ({"prompt_token_ids": "abc"}, "a prompt must be text or a list of token ids, not str"),
    ({"prompt": "x", "cache_salt": 5}, "cache_salt=5: must be a string"),
    ("half a pair: \ud800", "surrogate"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=[message[:40] for _, message in PROMPTS])
def test_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, greedy_params(5), use_tqdm=False)
    with pytest.raises(RequestError, match=message):
        next(llm.stream(prompt, greedy_params(5)))
    assert_goes_on(llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (5, "sampling_params: give one SamplingParams for all prompts, or one for each of the 2"),
        ({"temperature": 0}, "sampling_params: give one SamplingParams"),
        ([greedy_params(1)], "one for each of the 2"),
        ([greedy_params(1), None], "one for each of the 2"),
        (greedy_params(1, allowed_token_ids=[1, 600]), "allowed_token_ids: token id 600 is outside the vocabulary"),
        (greedy_params(1, logit_bias={700: 1.0}), "logit_bias: token id 700 is outside the vocabulary"),
        (greedy_params(1, stop_token_ids=[800]), "stop_token_ids: token id 800 is outside the vocabulary"),
        (greedy_params(1, logprobs=0, logprob_token_ids=[800]), "logprob_token_ids: token id 800 is outside"),
    ],
)
def test_parameters_of_requests(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert_goes_on(llm)


def test_one_refused_prompt_refuses_them_all(llm: LLM) -> None:
    with pytest.raises(RequestError, match="^prompt 2: the prompt is empty"):
        llm.generate(["a", "b", "", "c"], greedy_params(3), use_tqdm=False)
    assert_goes_on(llm)


def test_requests_by_hand(llm: LLM) -> None:
    llm.add_request("a", greedy_params(3), request_id="mine")
    with pytest.raises(RequestError, match="request_id='mine': a request of this name is still running"):
        llm.add_request("b", greedy_params(3), request_id="mine")
    with pytest.raises(RequestError, match="sampling_params='hot': must be a SamplingParams"):
        llm.add_request("b", "hot")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="priority: give one int for all prompts"):
        llm.generate(["a", "b"], priority=[1], use_tqdm=False)
    assert llm.num_unfinished_requests == 1
    llm.abort("mine")
    assert_goes_on(llm)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message is needed"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "system message must be the first"),
        ([{"content": "a"}], "role"),
        ("hello", "message"),
    ],
)
def test_conversations(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, greedy_params(3), use_tqdm=False)
    assert_goes_on(llm)


def test_beams(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt of 250 tokens and max_tokens=7 exceed max_model_len=256"):
        llm.beam_search([[5] * 250], BeamSearchParams(beam_width=2, max_tokens=7))
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.beam_search("", BeamSearchParams(beam_width=2, max_tokens=7))
    assert_goes_on(llm)


def test_text_where_there_is_no_tokenizer() -> None:
    with open_llm("llama") as llm:
        for refused, message in [
            (
                lambda: llm.generate("text", use_tqdm=False),
                "skip_tokenizer_init=True: there is no tokenizer; give prompt_token_ids",
            ),
            (lambda: llm.generate([5], greedy_params(1, stop="x"), use_tqdm=False), "stop and bad_words are text"),
            (lambda: llm.generate([5], greedy_params(1, bad_words=["x"]), use_tqdm=False), "stop and bad_words are"),
            (lambda: llm.chat([{"role": "user", "content": "x"}]), "a conversation needs the tokenizer"),
        ]:
            with pytest.raises(RequestError, match=message):
                refused()
        assert len(llm.generate([5], greedy_params(2), use_tqdm=False)[0]["token_ids"]) == 2


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0: must be an integer of at least 1"),
    ({"n": 1000}, "n=1000: must be an integer of at least 1 and at most"),
    ({"n": 1.0}, "n=1.0: must be an integer"),
    ({"n": True}, "n=True: must be an integer"),
    ({"temperature": -0.1}, r"temperature=-0.1: must be a finite number in \[0"),
    ({"temperature": NAN}, "temperature=nan: must be a finite number"),
    ({"temperature": math.inf}, "temperature=inf: must be a finite number"),
    ({"temperature": "warm"}, "temperature='warm': must be a finite number"),
    ({"top_p": 0.0}, r"top_p=0.0: must be a finite number in \(0, 1\]"),
    ({"top_p": 1.1}, "top_p=1.1: must be"),
    ({"top_k": -2}, "top_k=-2: must be an integer of at least -1"),
    ({"top_k": 2.5}, "top_k=2.5: must be an integer"),
    ({"min_p": -0.1}, "min_p=-0.1: must be"),
    ({"min_p": 2}, "min_p=2: must be"),
    ({"presence_penalty": 2.1}, r"presence_penalty=2.1: must be a finite number in \[-2, 2\]"),
    ({"frequency_penalty": -3}, "frequency_penalty=-3: must be"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0: must be a finite number in \(0, inf\)"),
    ({"seed": 2**64}, "seed=18446744073709551616: must be an integer"),
    ({"seed": "lucky"}, "seed='lucky': must be an integer"),
    ({"max_tokens": 0}, "max_tokens=0: must be an integer of at least 1"),
    ({"min_tokens": -1}, "min_tokens=-1: must be an integer of at least 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5: must not exceed max_tokens=4"),
    ({"logprobs": -1}, "logprobs=-1: must be an integer of at least 0"),
    ({"prompt_logprobs": 101}, "prompt_logprobs=101: must be an integer of at least 0 and at most 100"),
    ({"stop": ""}, "stop='': must be a non-empty string"),
    ({"stop": ["a", ""]}, "must be a non-empty string or a list of them"),
    ({"stop": 5}, "stop=5: must be a non-empty string"),
    ({"stop": "x", "detokenize": False}, "stop strings need detokenization: set detokenize=True or use stop_token_ids"),
    ({"bad_words": [5]}, r"bad_words=\[5\]: must be a non-empty string"),
    ({"stop_token_ids": [-1]}, "must be a list of token ids"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids=.*: needs logprobs; set it to 0 or more"),
    ({"logprob_token_ids": list(range(101)), "logprobs": 0}, "must name at most 100 tokens"),
    ({"logprob_token_ids": ["a"], "logprobs": 0}, "must be a list of token ids"),
    ({"stop_token_ids": "ab"}, "stop_token_ids='ab': must be a list of token ids"),
    ({"stop_token_ids": 5}, "stop_token_ids=5: must be a list of token ids"),
    ({"allowed_token_ids": []}, "must name at least one token, or be None to allow all"),
    ({"allowed_token_ids": 7}, "allowed_token_ids=7: must be a list of token ids"),
    ({"logit_bias": [1, 2]}, "must map token ids to numbers"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias token='a': must be an integer"),
    ({"logit_bias": {3: 101.0}}, r"logit_bias\[3\]=101.0: must be a finite number in \[-100, 100\]"),
    ({"logit_bias": {3: NAN}}, r"logit_bias\[3\]=nan"),
    ({"ignore_eos": 1}, "ignore_eos=1: must be True or False"),
    ({"detokenize": "no"}, "detokenize='no': must be True or False"),
]


@pytest.mark.parametrize(("settings", "message"), SAMPLING, ids=[str(settings)[:50] for settings, _ in SAMPLING])
def test_sampling_params(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_width": 0, "max_tokens": 5}, "beam_width=0: must be an integer of at least 1"),
        ({"beam_width": 51, "max_tokens": 5}, "beam_width=51: must be an integer of at least 1 and at most 50"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens=0: must be"),
        ({"beam_width": 2, "max_tokens": 5, "length_penalty": NAN}, "length_penalty=nan"),
        ({"beam_width": 2, "max_tokens": 5, "ignore_eos": None}, "ignore_eos=None: must be True or False"),
    ],
)
def test_beam_search_params(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**settings)


# --- options ----------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seq": 4}, "unknown option 'max_num_seq'; did you mean 'max_num_seqs'"),
    ({"colour": "red"}, "unknown option 'colour'; known options: model, tokenizer,"),
    ({"max_num_seqs": 0}, "max_num_seqs=0: must be an integer of at least 1"),
    ({"max_model_len": "long"}, "max_model_len='long': must be an integer"),
    ({"max_num_batched_tokens": 4}, "max_num_batched_tokens=4: must be at least max_num_seqs=8"),
    ({"kv_cache_block_size": 24}, "kv_cache_block_size=24: must be a multiple of 16"),
    ({"num_kv_cache_blocks": 0}, "num_kv_cache_blocks=0: must be an integer of at least 1"),
    ({"num_kv_cache_blocks": -1, "kv_cache_memory_bytes": 100}, "no memory for the KV cache: one block of 16 tokens"),
    ({"kv_cache_memory_bytes": -5}, "kv_cache_memory_bytes=-5: must be"),
    ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1.5: must be a number in \(0, 1\]"),
    ({"gpu_memory_utilization": NAN}, "gpu_memory_utilization=nan"),
    ({"cpu_memory_utilization": 0}, "cpu_memory_utilization=0: must be"),
    ({"device": "gpu"}, "device='gpu': must be one of auto, cpu, cuda"),
    ({"dtype": "float32x"}, r"dtype='float32x': must be one of .* \(did you mean 'float32'\?\)"),
    ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4': must be one of"),
    ({"kv_cache_dtype": "fp8", "device": "cpu"}, "kv_cache_dtype='fp8': only the triton backend can do this"),
    (
        {"deterministic": True, "device": "cpu", "cpu_kernels": "torch"},
        "deterministic=True: only the triton backend can do this",
    ),
    ({"attention_backend": "triton", "device": "cpu"}, "attention_backend='triton': it runs on CUDA devices"),
    ({"deterministic": "yes"}, "deterministic='yes': must be bool"),
    ({"attention_backend": "flash"}, "attention_backend='flash': must be one of auto, sdpa"),
    ({"load_format": "pt"}, "load_format='pt': must be one of"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: must be an integer of at least 1"),
    ({"overlap": "yes"}, "overlap='yes': must be bool"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching=1: must be bool"),
    ({"skip_tokenizer_init": None}, "skip_tokenizer_init=None: must be bool"),
    ({"seed": -1}, "seed=-1: must be an integer of at least 0"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm("llama", **options)


def test_a_type_this_cpu_cannot_compute_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.runner.device.cpu_has_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match="dtype='bfloat16': this CPU has no bfloat16 arithmetic.*use dtype='auto'"):
        open_llm("llama", dtype="bfloat16")
    with pytest.raises(ConfigError, match="dtype='float16': CPU kernels add up in float16.*use dtype='auto'"):
        open_llm("llama", dtype="float16")
    with open_llm("llama", dtype="auto") as llm:
        assert len(llm.generate([5], greedy_params(2), use_tqdm=False)[0]["token_ids"]) == 2


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda': torch sees no CUDA device here; use device='cpu'"):
        open_llm("llama", device="cuda")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path, file: str = "model.safetensors", keep: float = 0.5) -> None:
    path = folder / file
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, r"model\.safetensors: damaged or incomplete"),
    "truncated in its header": (lambda f: truncate(f, keep=0.001), r"model\.safetensors: damaged or incomplete"),
    "empty file": (lambda f: truncate(f, keep=0.0), r"model\.safetensors: damaged or incomplete"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\x80" * 5000), "damaged or incomplete"),
    "wrong shape": (
        lambda f: edit_tensors(f, lambda t: t.update({Q_PROJ: torch.zeros(3, 5)})),
        Q_PROJ + r" has shape \[3, 5\], and the config asks for \[64, 64\]",
    ),
    "missing tensor": (
        lambda f: edit_tensors(f, lambda t: t.pop(Q_PROJ)),
        "the weights do not fit the config: 1 missing: " + Q_PROJ + "; nothing unexpected",
    ),
    "unexpected tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.layers.9.extra": torch.zeros(3)})),
        r"nothing missing; 1 unexpected: model\.layers\.9\.extra",
    ),
    "more layers than weights": (
        lambda f: edit_config(f, lambda c: c.update(num_hidden_layers=5)),
        r"18 missing: model\.layers\.3\..* and 10 more; nothing unexpected",
    ),
    "fewer layers than weights": (
        lambda f: edit_config(f, lambda c: c.update(num_hidden_layers=2)),
        r"nothing missing; 9 unexpected",
    ),
    "unknown architecture": (
        lambda f: edit_config(f, lambda c: c.update(architectures=["MambaForCausalLM"])),
        "architecture 'MambaForCausalLM' is not known.*known:.* LlamaForCausalLM, MistralForCausalLM",
    ),
    "no architecture": (lambda f: edit_config(f, lambda c: c.pop("architectures")), "'architectures' is missing"),
    "config without a size": (lambda f: edit_config(f, lambda c: c.pop("hidden_size")), "hidden_size=None must be"),
    "config cut short": (lambda f: truncate(f, "config.json"), r"config\.json: cannot be read as JSON"),
    "config in bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), r"config\.json: cannot be read"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), "must be a JSON object, not a list"),
    "no config": (lambda f: (f / "config.json").unlink(), "the folder contains safetensors but no config.json"),
    "generation config cut short": (
        lambda f: truncate(f, "generation_config.json"),
        r"generation_config\.json: cannot be read as JSON",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"contains no \*\.safetensors file"),
    "only pickles": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"only pickle weights \(pytorch_model\.bin\), which can run code and are never loaded",
    ),
    "a folder where a file should be": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        r"model\.safetensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints(damage: str, tmp_path: Path) -> None:
    folder = copy_of("llama-rope3", tmp_path)
    do_damage, message = DAMAGES[damage]
    do_damage(folder)
    with pytest.raises(CheckpointError, match=message):
        open_llm(folder)


INDEX_DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "names a missing file": (
        lambda index: index["weight_map"].update({Q_PROJ: "model-99.safetensors"}),
        r"model-99\.safetensors is listed in model\.safetensors\.index\.json but missing",
    ),
    "names a file elsewhere": (
        lambda index: index["weight_map"].update({Q_PROJ: "../model.safetensors"}),
        r"'\.\./model\.safetensors' is not a plain file name",
    ),
    "names a number": (lambda index: index["weight_map"].update({Q_PROJ: 7}), "7 is not a plain file name"),
    "has no map": (lambda index: index.clear(), "has no weight_map"),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGES)
def test_damaged_index(damage: str, tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    edit, message = INDEX_DAMAGES[damage]
    edit_config(folder, edit, "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=message):
        open_llm(folder)


def test_a_shard_that_is_cut_short_or_gone(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    truncate(folder, shard.name)
    with pytest.raises(CheckpointError, match=shard.name + ": damaged or incomplete"):
        open_llm(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name + " is listed in .* but missing"):
        open_llm(folder)


def test_tensors_that_occur_twice(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    (folder / "model-copy.safetensors").write_bytes(shard.read_bytes())
    with pytest.raises(CheckpointError, match="occurs twice"):
        open_llm(folder)


def test_experts_of_a_wrong_shape(tmp_path: Path) -> None:
    folder = copy_of("qwen3-moe", tmp_path)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(2, 2)}))
    with pytest.raises(CheckpointError, match=name + r" has shape \[2, 2\]"):
        open_llm(folder)
    stacked = "model.layers.0.mlp.experts.up_proj"
    edit_tensors(folder, lambda tensors: tensors.update({stacked: torch.zeros(2)}))
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"1 missing: {name}; 1 unexpected: {stacked}"):
        open_llm(folder)


TOKENIZER_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json"),
    "cut short": (lambda f: truncate(f, "tokenizer.json"), r"tokenizer\.json"),
    "config cut short": (lambda f: truncate(f, "tokenizer_config.json"), r"tokenizer_config\.json"),
}


@pytest.mark.parametrize("damage", TOKENIZER_DAMAGES)
def test_damaged_tokenizer(damage: str, tmp_path: Path) -> None:
    folder = copy_of(TEXT_MODEL, tmp_path)
    do_damage, message = TOKENIZER_DAMAGES[damage]
    do_damage(folder)
    with pytest.raises(CheckpointError, match=message):
        open_llm(folder, skip_tokenizer_init=False)
    with open_llm(folder, skip_tokenizer_init=True) as llm:  # the weights are valid
        assert llm.generate([5], greedy_params(1), use_tqdm=False)


def test_formats_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="llama: cannot be opened: Is a directory"):
        open_llm("llama", load_format="gguf")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + b"\x00" * 10)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        LLM(gguf, device="cpu")


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="neither a config.json nor a .gguf"):
        LLM(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no file or folder at"):
        LLM(tmp_path / "nowhere" / "model.gguf")
    with pytest.raises(CheckpointError, match=r"a single file must be a \.gguf"):
        LLM(model_dir("llama") / "config.json")


def test_refusals_are_of_one_family() -> None:
    for kind in (ConfigError, RequestError, CheckpointError):
        assert issubclass(kind, NanoError) and issubclass(kind, ValueError)


def test_a_plan_refuses_what_opening_refuses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="must be an integer of at least 1"):
        LLM.plan(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'dtype'"):
        LLM.plan(model_dir("llama"), dtyp="float32")
