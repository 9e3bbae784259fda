"""What every client is asked to do; also for the clients that live in a virtual environment of their own."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "smollm2-135m"
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
REPORT = '{"degrees": 21, "sky": "sunny"}'


class City(BaseModel):
    """Bounded, so that a tiny model comes to an end."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=12)]
    country: Literal["France", "Austria", "Korea"]
    inhabitants: Annotated[int, Field(ge=0, le=99_999_999)]


class GetWeather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")  # otherwise a tiny model goes on with properties of its own

    city: Annotated[str, Field(max_length=12)]
    unit: Literal["c", "f"]


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"type": "string", "enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS},
}
OTHER_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
