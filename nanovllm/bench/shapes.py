"""Models to measure without their weights: a speed depends on a model's shape, not on what it has learned.

A shape is a folder `nanovllm/shapes/NAME` with nothing but a config.json. Opened with `load_format="dummy"` it gives a
model of the real size with random weights and no tokenizer: token ids in, token ids out.
"""

import difflib
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError

SHAPES = Path(__file__).parent.parent / "shapes"


def shape_names() -> list[str]:
    return sorted(file.parent.name for file in SHAPES.glob("*/config.json"))


def shape_folder(name: str) -> Path:
    known = shape_names()
    if name in known:
        return SHAPES / name
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"model_shape={name!r}: known are {', '.join(known)}{hint}")


def with_shape(engine: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The engine's options with the shape as their model; as they are where none is named."""
    if name is None:
        return engine
    if "model" in engine:
        raise ConfigError(f"model_shape={name!r} and model={engine['model']!r}: name one of them")
    if engine.get("load_format", "dummy") != "dummy":
        raise ConfigError(
            f"load_format={engine['load_format']!r}: a shape has no weights to load; "
            "leave it out, or name a model that has some with --model"
        )
    own = {"model": str(shape_folder(name)), "load_format": "dummy"}
    return {"skip_tokenizer_init": "tokenizer" not in engine, **engine, **own}
