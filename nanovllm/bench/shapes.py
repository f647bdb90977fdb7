"""Model shapes for benchmarks: the speed of a model depends on its shape, not on the values of its weights.

A shape is a folder `nanovllm/shapes/NAME` that contains only a config.json. With `load_format="dummy"` it loads as a
model of the real size with random weights and no tokenizer; prompts and outputs are token ids.
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
    """The engine options with the shape `name` as the model; unchanged if `name` is None."""
    if name is None:
        return engine
    if "model" in engine:
        raise ConfigError(f"model_shape={name!r} and model={engine['model']!r}: give one of them")
    if engine.get("load_format", "dummy") != "dummy":
        raise ConfigError(
            f"load_format={engine['load_format']!r}: a shape has no weights to load; "
            "leave load_format out, or load a model with --model"
        )
    own = {"model": str(shape_folder(name)), "load_format": "dummy"}
    return {"skip_tokenizer_init": "tokenizer" not in engine, **engine, **own}
