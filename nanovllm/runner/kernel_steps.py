"""What runs steps with our own kernels: the sampler, the decode step where the attention backend has one, and graphs of
steps with prompts where it can pad them."""

from typing import cast

from nanovllm.attention.interface import DeviceBackend
from nanovllm.attention.triton import TritonBackend
from nanovllm.config import Config
from nanovllm.layers.context import BuildContext
from nanovllm.runner.decode_step import DecodeStep
from nanovllm.runner.kernel_sampler import KernelSampler
from nanovllm.runner.kernel_table import KernelTable
from nanovllm.runner.prompt_graphs import PromptGraphs
from nanovllm.runner.sampling import Sampling
from nanovllm.runner.stage import Stage


def make_kernel_steps(
    config: Config, context: BuildContext, stage: Stage, table: KernelTable, *, keeps_row_state: bool
) -> tuple[Sampling, DecodeStep | None, PromptGraphs | None]:
    """`keeps_row_state`: a layer of the model does."""
    sampler = KernelSampler(table, config.max_num_seqs, context.device, pdl=context.pdl)
    sampling = Sampling(stage, table, sampler)
    if not context.attention.plans_on_device:
        return sampling, None, None
    decode = DecodeStep(
        stage,
        cast(DeviceBackend, context.attention),
        table,
        sampler,
        sampling,
        max_num_seqs=config.max_num_seqs,
        device=context.device,
        eager=config.enforce_eager,
        keeps_row_state=keeps_row_state,
    )
    backend, graphs = context.attention, decode.graphs
    is_whole = stage.kernels is not None and stage.model.shard.has_head
    if not is_whole or keeps_row_state or config.deterministic:
        return sampling, decode, None
    if graphs is None or not isinstance(backend, TritonBackend):
        return sampling, decode, None
    prompts = PromptGraphs(
        stage,
        backend,
        table,
        graphs,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        device=context.device,
    )
    return sampling, decode, prompts
