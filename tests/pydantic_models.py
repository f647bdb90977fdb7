"""Small pydantic models, from which the tests of structured output build their schemas."""

from enum import Enum
from typing import Annotated, Literal

import pytest

pydantic = pytest.importorskip("pydantic")

Short = Annotated[str, pydantic.Field(max_length=6)]
Small = Annotated[int, pydantic.Field(ge=0, le=99)]


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Small


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: Short
