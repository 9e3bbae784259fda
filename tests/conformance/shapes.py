"""Schemas of objects and arrays: required or not, open or closed, deep, wide, recursive, and combined."""

from typing import Any

from tests.conformance.builders import (
    BOOLEAN,
    NULL,
    Case,
    items,
    nullable,
    one_of,
    record,
    ref,
    text,
    whole,
)

A = {"a": whole()}
AB = {"a": whole(), "b": text(4)}
KEYS = {
    "spaces": "a key",
    "quotes": 'say "hi"',
    "backslash": "a\\b",
    "new line": "a\nb",
    "unicode": "ключ",
    "emoji": "🐋",
    "dollar": "$ref",
    "empty": "",
    "slash": "a/b~c",
    "dots": "a.b.c",
    "number": "0",
    "prototype": "__proto__",
    "long": "k" * 200,
}


def _objects() -> list[Case]:
    return [
        Case("empty object", {"type": "object", "additionalProperties": False}),
        Case("closed without properties", record({})),
        Case("one required", record(A)),
        Case("one optional", record(A, [])),
        Case("required and optional", record(AB, ["a"])),
        Case("all optional", record(AB | {"c": BOOLEAN}, [])),
        Case("optional first", record(AB | {"c": BOOLEAN}, ["c"])),
        Case("optional between", record(AB | {"c": BOOLEAN}, ["a", "c"])),
        Case("required in another order", record(AB, ["b", "a"])),
        Case("open", {"type": "object", "properties": A, "required": ["a"]}, bounded=False),
        Case("explicitly open", record(A, additionalProperties=True), bounded=False),
        Case("map of integers", {"type": "object", "additionalProperties": whole()}, bounded=False),
        Case("map of choices", {"type": "object", "additionalProperties": one_of("x", "y")}, bounded=False),
        Case("map of records", {"type": "object", "additionalProperties": record(A)}, bounded=False),
        Case("properties and a map", record(AB, ["a"], additionalProperties=whole()), bounded=False),
        Case("required without a schema", {"type": "object", "required": ["z"]}, bounded=False),
        Case("a forbidden property", record({"a": whole(), "b": False}, ["a"])),
        Case("a property that is anything", record({"a": True}), bounded=False),
        Case("no type", {"properties": AB, "required": ["a", "b"], "additionalProperties": False}, bounded=False),
        *(Case(f"key with {name}", record({key: whole(), f"{key}2": BOOLEAN})) for name, key in KEYS.items()),
        Case("prefixed keys", record({"a": whole(), "ab": whole(), "abc": whole(), "abcd": whole()}, ["ab"])),
        Case("wide", record({f"field_{index}": whole(0, 9) for index in range(50)})),
        Case("wide and optional", record({f"f{index}": BOOLEAN for index in range(50)}, [])),
        Case("wide strings", record({f"s{index}": text(3) for index in range(30)})),
    ]


def _pattern_properties() -> list[Case]:
    closed: dict[str, Any] = {"type": "object", "additionalProperties": False}
    return [
        Case("pattern properties", closed | {"patternProperties": {"^x[0-9]$": whole()}}, bounded=False),
        Case(
            "two pattern properties",
            closed | {"patternProperties": {"^n_[a-c]$": whole(), "^s_[a-c]$": text(3)}},
            bounded=False,
        ),
        Case(
            "properties beside pattern properties",
            closed | {"properties": {"id": whole()}, "required": ["id"], "patternProperties": {"^x[0-9]$": BOOLEAN}},
            bounded=False,
        ),
    ]


def _arrays() -> list[Case]:
    return [
        Case("empty array", {"type": "array", "maxItems": 0}),
        Case("up to three", items(whole())),
        Case("exactly two", items(whole(), 2, 2)),
        Case("three to five", items(one_of("a", "b"), 3, 5)),
        Case("twenty", items(whole(0, 9), 20, 20)),
        Case("strings", items(text(5), 1, 4)),
        Case("nullable items", items(nullable(whole()), 1, 4)),
        Case("mixed items", items({"anyOf": [whole(), text(3), NULL]}, 1, 5)),
        Case("records", items(record(AB), 1, 3)),
        Case("matrix", items(items(whole(0, 9), 3, 3), 3, 3)),
        Case("cube", items(items(items(BOOLEAN, 2, 2), 2, 2), 2, 2)),
        Case("tuple", {"type": "array", "prefixItems": [whole(), text(4)], "items": False, "minItems": 2}),
        Case("optional tuple", {"type": "array", "prefixItems": [whole(), text(4), BOOLEAN], "items": False}),
        Case(
            "tuple and rest",
            {"type": "array", "prefixItems": [text(4)], "items": whole(), "minItems": 1, "maxItems": 4},
        ),
        Case("unbounded", {"type": "array", "items": whole(0, 9)}, bounded=False),
        Case("at least two", {"type": "array", "items": BOOLEAN, "minItems": 2}, bounded=False),
        Case("array of anything", items(True, 1, 2), bounded=False),
        Case("array of empty objects", items(record({}), 1, 3)),
        Case("array of empty arrays", items({"type": "array", "maxItems": 0}, 1, 3)),
    ]


def nested(depth: int, wrap_arrays: bool) -> dict[str, Any]:
    """An object in an object in an object."""
    schema: dict[str, Any] = whole(0, 9)
    for level in range(depth):
        schema = items(schema, 1, 1) if wrap_arrays and level % 2 else record({f"level_{depth - level}": schema})
    return schema


def _deep() -> list[Case]:
    pair = record({"left": nested(3, False), "right": nested(3, True)})
    return [
        *(Case(f"{depth} deep", nested(depth, False)) for depth in (2, 5, 12, 30)),
        *(Case(f"{depth} deep with arrays", nested(depth, True)) for depth in (4, 12)),
        Case("two branches", pair),
        Case("object of arrays of objects", record({"rows": items(record({"cells": items(record(A), 1, 2)}), 1, 2)})),
    ]


def _tree(children: dict[str, Any]) -> dict[str, Any]:
    return record({"value": whole(0, 9), "children": children})


def _recursive() -> list[Case]:
    node = {"node": _tree(items(ref("node"), 0, 2))}
    link = record({"value": whole(0, 9), "next": nullable(ref("link"))})
    even = record({"even": nullable(ref("odd"))})
    odd = record({"odd": nullable(ref("even"))})
    sum_ = record({"op": one_of("+", "*"), "left": ref("term"), "right": ref("term")})
    json_value = {"anyOf": [whole(), text(4), items(ref("json"), 0, 2)]}
    binary = record({"left": nullable(ref("binary")), "right": nullable(ref("binary"))})
    file = record({"name": text(5), "size": whole()})
    folder = record({"name": text(5), "entries": items({"anyOf": [ref("file"), ref("folder")]}, 0, 2)})
    return [
        Case("tree", {"$ref": "#/$defs/node", "$defs": node}, bounded=False),
        Case("tree by the root", _tree(items({"$ref": "#"}, 0, 2)), bounded=False),
        Case("optional self", record({"v": whole(0, 9), "next": {"$ref": "#"}}, ["v"]), bounded=False),
        Case("linked list", {**ref("link"), "$defs": {"link": link}}, bounded=False),
        Case("mutual", {**ref("even"), "$defs": {"even": even, "odd": odd}}, bounded=False),
        Case(
            "expression",
            {**ref("term"), "$defs": {"term": {"anyOf": [whole(0, 9), ref("sum")]}, "sum": sum_}},
            bounded=False,
        ),
        Case("json in json", {**ref("json"), "$defs": {"json": json_value}}, bounded=False),
        Case("binary tree", {**ref("binary"), "$defs": {"binary": binary}}, bounded=False),
        Case("folders", {**ref("folder"), "$defs": {"file": file, "folder": folder}}, bounded=False),
    ]


def _references() -> list[Case]:
    names = {"name": text(6), "pair": record({"first": ref("name"), "last": ref("name")})}
    chain = {f"d{index}": ref(f"d{index + 1}") for index in range(10)} | {"d10": whole()}
    return [
        Case("definition", record({"who": ref("name")}) | {"$defs": names}),
        Case("definition of definitions", record({"who": ref("pair"), "by": ref("pair")}) | {"$defs": names}),
        Case("chain of references", {**ref("d0"), "$defs": chain}),
        Case("old definitions", record({"a": {"$ref": "#/definitions/n"}}) | {"definitions": {"n": whole()}}),
        Case("reference to a property", record({"a": whole(), "b": {"$ref": "#/properties/a"}})),
        Case("reference with limits beside", {"$ref": "#/$defs/s", "maxLength": 4, "$defs": {"s": {"type": "string"}}}),
        Case("escaped reference", {"$ref": "#/$defs/a~1b", "$defs": {"a/b": whole()}}),
        Case("unused definition", record(A) | {"$defs": {"unused": whole()}}),
        Case("with $schema", record(A) | {"$schema": "https://json-schema.org/draft/2020-12/schema"}),
        Case("with $id", record({"a": ref("n")}) | {"$id": "https://example.com/s", "$defs": {"n": whole()}}),
    ]


def kind(name: str, **properties: Any) -> dict[str, Any]:
    """One alternative of a union with a discriminator."""
    return record({"kind": {"const": name}, **properties})


def _combined() -> list[Case]:
    shapes = [kind("circle", radius=whole()), kind("square", side=whole()), kind("line", to=items(whole(), 2, 2))]
    base = {"type": "object", "properties": {"id": whole()}, "required": ["id"]}
    more = {"type": "object", "properties": {"name": text(5)}, "required": ["name"]}
    return [
        Case("any of records", {"anyOf": shapes}),
        Case("one of by discriminator", {"oneOf": shapes}),
        Case("one of by types", {"oneOf": [whole(), text(4), items(whole(), 1, 2), record(A)]}),
        Case("array of alternatives", items({"anyOf": shapes}, 1, 3)),
        Case("alternatives in a property", record({"shape": {"oneOf": shapes}, "label": text(5)})),
        Case("any of in any of", {"anyOf": [{"anyOf": [whole(), NULL]}, {"anyOf": [text(3), BOOLEAN]}]}),
        Case("all of records", {"allOf": [base, more]}, bounded=False),
        Case(
            "all of and closed", {"allOf": [base, {"properties": AB}]} | {"additionalProperties": True}, bounded=False
        ),
        Case("all of a reference", {"allOf": [ref("base")], "$defs": {"base": record(A)}}),
        Case("all of three", {"allOf": [{"type": "integer"}, {"minimum": 5}, {"exclusiveMaximum": 50}]}),
        Case("any of lengths", {"anyOf": [text(2), {"type": "string", "minLength": 4, "maxLength": 6}]}),
        Case("any of constants", {"anyOf": [{"const": "a"}, {"const": 1}, {"const": None}]}),
        Case("any of overlapping", {"anyOf": [record(AB), record(AB, ["a"]), record(A)]}),
        Case("nullable record", nullable(record(AB))),
        Case("nullable array", nullable(items(whole(), 1, 2))),
        Case("optional nullable", record({"a": nullable(whole()), "b": nullable(text(3))}, [])),
        Case("type list with properties", {**record(A), "type": ["object", "null"]}),
        Case("enum of records in a record", record({"v": {"enum": [{"x": 1}, {"x": 2}]}, "w": one_of(1, 2)})),
        Case("forty alternatives", {"anyOf": [kind(f"k{index}", v=whole(0, 9)) for index in range(40)]}),
    ]


def cases() -> list[Case]:
    """All of them."""
    return [
        *_objects(),
        *_pattern_properties(),
        *_arrays(),
        *_deep(),
        *_recursive(),
        *_references(),
        *_combined(),
    ]
