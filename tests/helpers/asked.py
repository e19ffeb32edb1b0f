"""What tests of client libraries ask for: forms that a grammar can hold any model to, the demo model as well."""

# annotations are read by libraries, so none of them is text
from typing import Literal

import pydantic

ASKED = "Name a module of Python's standard library, and what it is for."


class Module(pydantic.BaseModel):
    """Of Python's standard library."""

    name: str = pydantic.Field(max_length=12)
    kind: Literal["text", "files", "network"]
    lines: int = pydantic.Field(ge=1, le=99999)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=3)


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


def get_weather(city: Literal["Oslo", "Rome"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather of a city.

    Args:
        city: which.
        unit: of the answer.
    """
    return f"Rain in {city}, and 4 degrees {unit}."
