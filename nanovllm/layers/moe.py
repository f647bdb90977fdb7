"""A mixture of experts: each token passes the few experts its router picks."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.kernels.select import FP8
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear, silu_and_mul
from nanovllm.layers.moe_spec import ClampedGlu, MoeSpec
from nanovllm.layers.residual import Residual
from nanovllm.weights.dense import DenseWeight
from nanovllm.weights.format import StoredWeight

if TYPE_CHECKING:
    from nanovllm.kernels.moe.route_rows import Routed


class MoE:
    """Tokens are sorted by expert, so that each expert used runs once over all its tokens.

    On a GPU kernels do the same without asking the host how many tokens an expert has.
    """

    chooses_plainly = True  # as `choose_experts` does, from the logits of `router`

    def __init__(self, spec: MoeSpec, context: BuildContext) -> None:
        self.num_experts = spec.num_experts
        self.num_experts_per_token = spec.num_experts_per_token
        self.norm_topk_prob = spec.norm_topk_prob
        self.group, self._dtype = context.group, context.dtype
        self._weights = spec.weights()
        bias = {"bias": self._weights["router_bias"]} if spec.bias else {}
        self.router = Linear({"weight": self._weights["router"], **bias}, context)
        self.gate_up = self._empty("gate_up", context)  # [experts, gate's rows then up's, hidden]
        self.down = self._empty("down", context)  # [experts, hidden, intermediate]
        self._biases = {name: self._empty_bias(name, context) for name in self._held_biases()}
        self._activate, form = activation_of(spec)
        self._arguments: dict[str, Tensor] = {}  # of the kernels
        self._kernels: Callable[..., Tensor] | None = None
        self._choose: Callable[..., tuple[Tensor, Tensor]] = choose_experts
        self._route_few: Callable[..., Routed] | None = None  # norm, router and choice in one launch
        self._route_tokens: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None  # the same for more tokens
        self._most_tokens = 0  # for which that is faster than three launches
        self._add_rounded: Callable[..., Residual] | None = None
        self._dequantizes = not {self.gate_up.format_name, self.down.format_name} <= {"dense", "int8"}
        if context.kernels:
            from nanovllm.kernels.moe.experts import ROW_TOKENS, experts_forward
            from nanovllm.kernels.moe.route import route

            self._kernels = partial(experts_forward, deterministic=context.deterministic, pdl=context.pdl, **form)
            self._choose = partial(route, pdl=context.pdl)
            if self._dequantizes and context.dtype.itemsize == 2:
                self._dequantizes = not packed_kernels_serve(self.gate_up, self.down)
            if self.router.weight.format_name == "dense" and not context.deterministic:
                from nanovllm.kernels.moe.route_rows import Choice, route_rows

                choice = Choice(spec.num_experts_per_token, spec.norm_topk_prob)
                arrived = torch.zeros(ROW_TOKENS, dtype=torch.int32, device=context.device)
                self._route_few = partial(route_rows, choice=choice, arrived=arrived, pdl=context.pdl)
                self._set_route_tokens(spec, context)
                fp8 = {self.gate_up.format_name, self.down.format_name} <= {*FP8} and not self._dequantizes
                if fp8 and context.gluon and context.dtype.itemsize == 2 and self.group.size == 1:
                    self._add_rounded = self._rounded_experts(spec, form, arrived=arrived[:1], pdl=context.pdl)

    def _set_route_tokens(self, spec: MoeSpec, context: BuildContext) -> None:
        from nanovllm.kernels.moe.route_tokens import MOST_TOKENS, route_tokens, route_tokens_serves

        if route_tokens_serves(spec.num_experts, spec.hidden_size):
            choice: dict[str, Any] = {"top_k": spec.num_experts_per_token, "normalize": spec.norm_topk_prob}
            self._route_tokens, self._most_tokens = partial(route_tokens, **choice, pdl=context.pdl), MOST_TOKENS

    def _rounded_experts(self, spec: MoeSpec, form: dict[str, Any], **options: Any) -> "Callable[..., Residual] | None":
        from nanovllm.layers.rounded_experts import RoundedExperts

        own = RoundedExperts(form, top_k=spec.num_experts_per_token, normalize=spec.norm_topk_prob, **options)
        return own if own.serves(**self._kernel_arguments()) else None

    def _empty(self, name: str, context: BuildContext) -> StoredWeight:
        shape = self._weights[name].shard_shape(context.group.rank, context.group.size)
        form = context.format_of(self._weights[name])
        return form.empty(shape, dtype=context.dtype, device=context.device)

    def _held_biases(self) -> list[str]:
        """Those that this rank adds."""
        held = (name for name in ("gate_up_bias", "down_bias") if name in self._weights)
        return [name for name in held if self.group.rank == 0 or not self._weights[name].on_first_rank]

    def _empty_bias(self, name: str, context: BuildContext) -> Tensor:  # [experts, rows]
        shape = self._weights[name].shard_shape(context.group.rank, context.group.size)
        return torch.empty(shape, dtype=context.dtype, device=context.device)

    # --- loading ------------------------------------------------------------------------------------------------------

    def slots(self) -> dict[str, Slot]:
        rank, size = self.group.rank, self.group.size
        found = self.router.slots() | slots_of(self._weights["gate_up"], self.gate_up, rank, size)
        found |= slots_of(self._weights["down"], self.down, rank, size)
        for name, bias in self._biases.items():
            found |= slots_of(self._weights[name], DenseWeight(bias), rank, size)
        return found

    def finish_loading(self) -> None:
        self.router.finish_loading()
        self.gate_up.finish_loading()
        self.down.finish_loading()
        self._arguments.clear()

    def _kernel_arguments(self) -> dict[str, Tensor]:
        if self._dequantizes:  # no kernel takes this format, nor can a CUDA graph ask which experts are used
            dense = {"gate_up": self.gate_up.dequantized(), "down": self.down.dequantized()}
            return {name: weight.to(self._dtype) for name, weight in dense.items()} | self._biases
        if not self._arguments:
            gate_up, down = self.gate_up.kernel_arguments(), self.down.kernel_arguments()
            self._arguments = {"gate_up": gate_up["weight"], "down": down["weight"], **self._biases}
            if "scale" in gate_up:
                self._arguments |= {"gate_up_scale": gate_up["scale"], "down_scale": down["scale"]}
        return self._arguments

    # --- computing ----------------------------------------------------------------------------------------------------

    def __call__(self, x: Residual, *, norm: RMSNorm) -> Residual:
        """Add the experts' sum for norm(x) to x."""
        if self._add_rounded is not None and self._route_few is not None and len(x) and norm.fuses:
            calls = {"route": self._route, "routed_few": self._routed_few}
            router = self.router if self.chooses_plainly else None
            return self._add_rounded(x, norm, **self._kernel_arguments(), router=router, **calls)
        if self._route_few is not None and len(x) == 1:  # more tokens would read the router's weight several times
            routed = self._routed_few(x, norm)
            return self._add_experts(x, routed.normed, routed.weights, routed.experts)
        if self._route_tokens is not None and len(x) <= self._most_tokens:
            rows, partial_sums = x.take()
            weights = self._router_weights()
            normed, *chosen = self._route_tokens(rows, norm.weight, norm.eps, partial_sums=partial_sums, **weights)
            return self._add_experts(x, normed, *chosen)
        normed = x.normed(norm)
        return self._add_experts(x, normed, *self._route(normed))

    def _routed_few(self, x: Residual, norm: RMSNorm, **shared: Any) -> "Routed":
        """`shared`: weights of a shared expert, or the experts' weight whose inputs are rounded."""
        assert self._route_few is not None
        rows, partial_sums = x.take()
        weights: dict[str, Any] = self._router_weights() | shared
        routed = self._route_few(rows, norm.weight, norm.eps, partial_sums=partial_sums, **weights)
        x.rows = routed.rows
        return routed

    def _router_weights(self) -> dict[str, Tensor | None]:
        return {"router": self.router.weight.kernel_arguments()["weight"], "router_bias": self.router.bias}

    def _add_experts(
        self, x: Residual, normed: Tensor, weights: Tensor, experts: Tensor, **shared: tuple[Tensor, Tensor]
    ) -> Residual:
        rows = x.rows if self.group.rank == 0 else None  # of the ranks that are summed, one adds the residual
        y = self._sum(normed, weights, experts, rows, in_parts=self.group.size == 1, **shared)
        if y.dim() == 2:
            x.rows = y
        else:
            x.add_later(y)
        return x

    def sum_experts(self, x: Tensor, *, routed_by: Tensor, residual: Tensor | None = None) -> Tensor:
        """The experts' sum of all ranks for x, [tokens, hidden], plus residual. `routed_by`: the router's inputs."""
        return self._sum(x, *self._route(routed_by), residual)

    def _sum(
        self,
        x: Tensor,  # [num_tokens, hidden]
        weights: Tensor,  # [num_tokens, k]
        experts: Tensor,  # [num_tokens, k]
        residual: Tensor | None,
        *,
        in_parts: bool = False,  # kernels may give a part of each choice without the residual, [k, num_tokens, hidden]
        **shared: tuple[Tensor, Tensor],  # of a shared expert, for the kernels
    ) -> Tensor:
        if self._kernels is not None:
            arguments = self._kernel_arguments() | shared
            options = {"residual": residual, "in_parts": in_parts}
            y = self._kernels(x, **arguments, weights=weights, experts=experts, **options)
        else:
            y = self.forward(x, weights, experts)
            y = y if residual is None else residual + y
        return self.group.all_reduce(y)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, hidden] -> weights, of its type, and experts, [num_tokens, k]"""
        return self._choose(self.router(x), self.num_experts_per_token, normalize=self.norm_topk_prob)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """On torch alone: [num_tokens, hidden] and, for each token, [num_tokens, k] weights and experts."""
        order = experts.reshape(-1).argsort(stable=True)
        tokens = order // self.num_experts_per_token  # which token each sorted entry belongs to
        counts = torch.bincount(experts.reshape(-1), minlength=self.num_experts).tolist()
        sorted_x = x[tokens]
        sorted_y = torch.empty_like(sorted_x)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(begin, begin + count)
                first, second = (self._bias(name, expert) for name in ("gate_up_bias", "down_bias"))
                hidden = self._activate(self.gate_up.matmul(sorted_x[rows], first, expert))
                sorted_y[rows] = self.down.matmul(hidden, second, expert)
                begin += count
        sorted_y *= weights.reshape(-1)[order, None]
        # back to [token, choice] order before summing: the order of addition must not depend on the batch
        unsorted = torch.empty_like(sorted_y)
        unsorted[order] = sorted_y
        return unsorted.view(x.shape[0], self.num_experts_per_token, -1).sum(dim=1)

    def _bias(self, name: str, expert: int) -> Tensor | None:
        return self._biases[name][expert] if name in self._biases else None


def activation_of(spec: MoeSpec) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """What torch makes of gate and up, and the arguments that tell the kernels to do the same."""
    if isinstance(spec.activation, ClampedGlu):
        return partial(clamped_glu, form=spec.activation), asdict(spec.activation)
    if spec.activation == "gelu":
        from nanovllm.layers.gelu import gelu_and_mul

        return gelu_and_mul, {"gelu": True}
    return silu_and_mul, {}


def clamped_glu(gate_up: Tensor, form: ClampedGlu) -> Tensor:  # [..., 2 * size] -> [..., size]
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return gate * torch.sigmoid(form.alpha * gate) * (up + 1)


def packed_kernels_serve(*weights: StoredWeight) -> bool:
    """Whether the kernels for packed experts read these weights."""
    from nanovllm.kernels.linear.packed import PackedWords
    from nanovllm.kernels.select import PACKED

    served = (
        one.format_name in PACKED and isinstance(one.kernel_arguments()["weight"], PackedWords) for one in weights
    )
    return all(served)


def choose_experts(
    logits: Tensor, top_k: int, *, normalize: bool, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[num_tokens, experts] -> weights and experts, [num_tokens, top_k]; kernels/moe/route.py does it in one launch.

    `factors`: [experts], multiplied with the weights at the end.
    """
    weights, experts = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if factors is not None:
        weights = weights * factors.float()[experts]
    return weights.to(logits.dtype), experts
