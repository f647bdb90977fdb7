"""Which part of a model a rank holds: numbers alone."""

from dataclasses import dataclass, replace

from nanovllm.distributed.group import Place
from nanovllm.errors import ConfigError
from nanovllm.models.spec import ModelConfig


@dataclass(frozen=True)
class Span:
    """A range of a dimension that the ranks of a group share."""

    start: int
    size: int
    whole: int

    @property
    def part(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Share:
    model: (
        ModelConfig  # what this rank computes, as if it were a model of its own; only its vocabulary is the whole one
    )
    layers: range  # of the whole model
    has_embedding: bool
    has_head: bool  # and the norm in front of it
    queries: Span  # rows of q_proj, columns of o_proj
    keys: Span  # rows of k_proj and v_proj; the same on several ranks where there are more ranks than KV heads
    mlp: Span  # rows of gate_proj and up_proj, columns of down_proj
    experts: Span | None  # the same of each expert
    vocab: Span  # rows of embedding and head
    vocab_rows: int  # rows that a rank keeps for its part of the vocabulary, padding included

    def num_parameters(self) -> int:
        """Of this rank; biases that rank 0 alone adds are counted on all."""
        model = self.model
        held, counted = self.has_embedding + self.has_head, 2  # embedding and head
        if model.tie_word_embeddings:
            held, counted = min(held, 1), 1
        rows = held * self.vocab.size - counted * model.vocab_size
        final_norm = 0 if self.has_head else -1
        return model.num_parameters() + (rows + final_norm) * model.hidden_size


def share_of(model: ModelConfig, place: Place) -> Share:
    """Raises where the model cannot be spread like that."""
    layers = _stage_layers(model.num_layers, place)
    rank, size = place.tensor_rank, place.tensor_parallel_size
    heads = _even(model.num_heads, "attention heads", rank, size)
    kv_heads = _kv_heads(model.num_kv_heads, rank, size)
    mlp = _even(model.intermediate_size, "columns of the MLP", rank, size)
    moe, experts = model.moe, None
    if moe is not None:
        experts = _even(moe.intermediate_size, "columns of an expert", rank, size)
        dense = frozenset(layer - layers.start for layer in moe.dense_layers if layer in layers)
        moe = replace(moe, intermediate_size=experts.size, dense_layers=dense)
    vocab_rows = -(-model.vocab_size // size)
    first_token = min(rank * vocab_rows, model.vocab_size)
    return Share(
        model=replace(
            model,
            num_layers=len(layers),
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            intermediate_size=mlp.size,
            windows=model.windows[layers.start : layers.stop],
            moe=moe,
        ),
        layers=layers,
        has_embedding=layers.start == 0,
        has_head=layers.stop == model.num_layers,
        queries=_times(heads, model.head_dim),
        keys=_times(kv_heads, model.head_dim),
        mlp=mlp,
        experts=experts,
        vocab=Span(first_token, min(vocab_rows, model.vocab_size - first_token), model.vocab_size),
        vocab_rows=vocab_rows,
    )


def _stage_layers(num_layers: int, place: Place) -> range:
    """Evenly; what is left over goes to the stages before the last, which has the head to compute."""
    stages = place.pipeline_parallel_size
    if stages > num_layers:
        raise ConfigError(f"pipeline_parallel_size={stages}: the model has only {num_layers} layers; use at most that")
    each, extra = divmod(num_layers, stages)
    longer = range(stages - 1 - extra, stages - 1)
    counts = [each + (stage in longer) for stage in range(stages)]
    first = sum(counts[: place.pipeline_rank])
    return range(first, first + counts[place.pipeline_rank])


def _even(whole: int, what: str, rank: int, size: int) -> Span:
    if whole % size:
        raise ConfigError(
            f"tensor_parallel_size={size}: the model's {whole} {what} cannot be split evenly; use a divisor of {whole}"
        )
    return Span(rank * whole // size, whole // size, whole)


def _kv_heads(whole: int, rank: int, size: int) -> Span:
    """Several ranks hold the same KV head where there are fewer than ranks."""
    if whole % size and size % whole:
        raise ConfigError(
            f"tensor_parallel_size={size}: the model's {whole} KV heads can be neither split nor repeated evenly; "
            f"use a divisor or a multiple of {whole}"
        )
    return Span(rank * whole // size, max(whole // size, 1), whole)


def _times(span: Span, factor: int) -> Span:
    return Span(span.start * factor, span.size * factor, span.whole * factor)
