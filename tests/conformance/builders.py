"""Words for writing JSON schemas shortly; most of what they make is bounded, so that a model's answer soon ends."""

from typing import Any, NamedTuple

Schema = dict[str, Any] | bool


class Case(NamedTuple):
    """One schema. bounded: every text of it is short, so none may be cut by max_tokens."""

    name: str
    schema: Schema
    bounded: bool = True


def text(longest: int = 8, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest, **more}


def whole(low: int = 0, high: int = 999, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def one_of(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def items(of: Any, least: int = 0, most: int = 3, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": least, "maxItems": most, **more}


def record(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A closed object; every property is required unless a list says which."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


BOOLEAN = {"type": "boolean"}
NULL = {"type": "null"}
