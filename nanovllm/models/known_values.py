"""Values of a config that change what a model computes and of which only some are implemented; no torch."""

from collections.abc import Mapping
from typing import Any

from nanovllm.errors import CheckpointError


def check_known(raw: dict[str, Any], known: Mapping[str, tuple[Any, ...]]) -> None:
    """`known`: the values implemented, by key; the first is what a config that lacks the key means."""
    for name, values in known.items():
        value = raw.get(name, values[0])
        if value not in values:
            architecture = raw["architectures"][0]
            raise CheckpointError(f"config: {name}={value!r} is not implemented for {architecture}")
