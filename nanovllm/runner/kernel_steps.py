"""What runs steps with our own kernels: the sampler, and the decode step where the attention backend has one."""

from typing import cast

from nanovllm.attention.interface import DeviceBackend
from nanovllm.config import Config
from nanovllm.layers.context import BuildContext
from nanovllm.runner.decode_step import DecodeStep
from nanovllm.runner.kernel_sampler import KernelSampler
from nanovllm.runner.kernel_table import KernelTable
from nanovllm.runner.sampling import Sampling
from nanovllm.runner.stage import Stage


def make_kernel_steps(
    config: Config, context: BuildContext, stage: Stage, table: KernelTable, *, keeps_row_state: bool
) -> tuple[Sampling, DecodeStep | None]:
    """`keeps_row_state`: a layer of the model does."""
    sampler = KernelSampler(table, config.max_num_seqs, context.device, pdl=context.pdl)
    sampling = Sampling(stage, table, sampler)
    if not context.attention.plans_on_device:
        return sampling, None
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
    return sampling, decode
