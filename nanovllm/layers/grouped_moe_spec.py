"""The mixture of experts of DeepSeek: experts are chosen among those of the best groups; no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.layers.shared_expert_spec import SharedExpertSpec
from nanovllm.layers.spec import Dim, Weight

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class GroupedMoeSpec(SharedExpertSpec):
    """A group counts as much as its best expert with softmax scores, as its two best with sigmoid scores."""

    scoring: Literal["softmax", "sigmoid"]  # sigmoid: a learned bias of each expert is added for the choice alone
    num_groups: int
    num_chosen_groups: int
    scaling: float  # the chosen experts' weights are multiplied with it
    least_sum: float = 1e-20  # added to the sum that weights are divided by

    def weights(self) -> dict[str, Weight]:
        found = super().weights()
        if self.scoring == "sigmoid":
            found["choice_bias"] = Weight((f"{self.router_name}.e_score_correction_bias",), (Dim(self.num_experts),))
        return found

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.grouped_moe import GroupedMoE

        return GroupedMoE(self, context)
