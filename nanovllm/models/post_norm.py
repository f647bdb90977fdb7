"""A layer that norms what a part gives, not what it gets: x + norm(mixer(x)), then x + norm(feed_forward(x))."""

from typing import Any

from torch import Tensor

from nanovllm.layers.mlp import MLP
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step
from nanovllm.models.decoder import DecoderLayer


class PostNormLayer(DecoderLayer):
    def __call__(self, x: Residual, state: Any, step: Step, wanted: Tensor | None = None) -> Residual:
        mixer: Any = self.mixer
        mixed = mixer.mix(x, state, step, norm=None)
        if wanted is not None:
            x.keep(wanted)
            mixed = mixed[wanted]
        if not len(x):
            return x
        x.rows = x.rows + self.input_norm(mixer.o_proj(mixed))
        mlp = self.feed_forward
        assert isinstance(mlp, MLP)
        x.rows = x.rows + self.ffn_norm(mlp.down_proj(mlp.gate_up_proj(x.rows, activation="silu")))
        return x
