"""All schemas that answers must conform to, and all that must be refused by the name of what is not implemented."""

from typing import Any

from tests.conformance import models, shapes, values
from tests.conformance.builders import Case, one_of, record, ref, text, whole

SCHEMAS: list[Case] = [*values.cases(), *shapes.cases(), *models.cases()]

_LIST: dict[str, Any] = {"type": "array", "items": whole(0, 9), "maxItems": 4}
_PAIR = {"a": whole(), "b": whole()}

# Name, schema, and the word that the answer's message must have.
UNSUPPORTED: list[tuple[str, Any, str]] = [
    ("not", {"not": {"type": "string"}}, "not"),
    ("not in a property", record({"a": {"not": {"const": 1}}}), "not"),
    ("if then", {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 5}}, "if"),
    ("if then else", {"if": {"type": "string"}, "then": text(3), "else": whole()}, "if"),
    ("unique items", _LIST | {"uniqueItems": True}, "uniqueItems"),
    ("unique items deep within", record({"a": record({"b": _LIST | {"uniqueItems": True}})}), "uniqueItems"),
    ("contains", _LIST | {"contains": {"const": 1}}, "contains"),
    ("contains some", _LIST | {"contains": {"const": 1}, "minContains": 2}, "contains"),
    ("property names", {"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ("property names of a dict", {"type": "object", "propertyNames": one_of("x", "y")}, "propertyNames"),
    ("dependent required", record(_PAIR, [], dependentRequired={"a": ["b"]}), "dependentRequired"),
    ("dependent schemas", record(_PAIR, [], dependentSchemas={"a": {"required": ["b"]}}), "dependentSchemas"),
    ("dependencies", record(_PAIR, [], dependencies={"a": ["b"]}), "dependencies"),
    ("unevaluated properties", {"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ("unevaluated items", {"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ("dynamic reference", {"$dynamicRef": "#a"}, "$dynamicRef"),
    ("overlapping one of", {"oneOf": [{"type": "string"}, text(3)]}, "oneOf"),
    ("one of by ranges", {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": -1}]}, "oneOf"),
    ("one of open records", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf"),
    *(
        (f"format {name}", {"type": "string", "format": name}, name)
        for name in ("color", "iri", "uri-reference", "regex", "json-pointer", "idn-email", "byte")
    ),
    ("look ahead", {"type": "string", "pattern": "^(?=a)b"}, "look-around"),
    ("look behind", {"type": "string", "pattern": "(?<=a)b"}, "look-around"),
    ("back reference", {"type": "string", "pattern": r"^(a)\1$"}, "backreferences"),
    ("word boundary", {"type": "string", "pattern": r"\bfoo\b"}, "lookarounds"),
    ("broken pattern", {"type": "string", "pattern": "^[a-"}, "regex"),
    ("false", record({"a": False}), "Unsatisfiable"),
    ("any 64 bits", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "range"),
    ("empty enum", {"enum": []}, "Unsatisfiable"),
    ("lengths crossed", {"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    ("limits crossed", {"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    ("unknown type", {"type": "colour"}, "colour"),
    ("type that is no name", {"type": 5}, "type"),
    ("reference to nothing", ref("nothing"), "nothing"),
    ("reference elsewhere", {"$ref": "http://example.com/x.json"}, "example.com"),
]
