"""A question, a tool and an answer's type, with few possible values: a model with random weights ends soon, too."""

from typing import Literal

import pytest

pydantic = pytest.importorskip("pydantic")

City = Literal["Paris", "Rome"]
QUESTION = "How warm is it?"
MESSAGES = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 200  # enough for every forced call and every answer with a schema


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: City
    degrees: Literal[10, 20, 30]  # Anthropic's client removes limits such as `maximum` from schemas


class Place(pydantic.BaseModel):
    """The arguments of the tool."""

    city: City


TOOL = {"name": "temperature", "description": "Measure the temperature in a city.", "schema": Place.model_json_schema()}
