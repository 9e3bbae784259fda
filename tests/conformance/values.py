"""Schemas of single values: strings, numbers, constants and formats."""

from typing import Any

from tests.conformance.builders import BOOLEAN, NULL, Case, nullable, record, text, whole

CONSTANTS: dict[str, Any] = {
    "string": "yes",
    "empty string": "",
    "quotes": 'a "quoted" \\ backslash / slash',
    "controls": "tab\tnew line\nreturn\rbell\x07",
    "unicode": "naïve café 안녕 🐋 \u2028",
    "integer": 42,
    "negative": -7,
    "zero": 0,
    "number": 2.5,
    "true": True,
    "false": False,
    "null": None,
    "array": [1, "a", None],
    "empty array": [],
    "object": {"a": 1, "b": [True]},
    "empty object": {},
    "nested": {"a": {"b": {"c": [[1], {"d": None}]}}},
}
ENUMS: dict[str, list[Any]] = {
    "strings": ["red", "green", "blue"],
    "one": ["only"],
    "prefixes": ["a", "ab", "abc", "abcd"],
    "integers": [1, 2, 3, 100, -5],
    "numbers": [0.5, 1.25, -2.75],
    "booleans": [True, False],
    "null or string": [None, "a"],
    "mixed": [1, "1", None, True, 1.5, [1], {"a": 1}],
    "unicode": ["é", "日本", "🐋🐋", "ß"],
    "escapes": ['"', "\\", "\n", "\u0001"],
    "long": ["x" * 60, "x" * 61, "y" * 60],
    "many": [f"value {index}" for index in range(200)],
    "countries": ["AT", "BE", "CH", "DE", "FR", "IT", "KR", "US"],
    "arrays": [[1, 2], [1, 3], []],
    "objects": [{"k": "a"}, {"k": "b", "v": 1}],
}
PATTERNS: dict[str, str] = {
    "lower": "^[a-z]{1,8}$",
    "digits": "^[0-9]{3}$",
    "phone": r"^\+[0-9]{1,3} [0-9]{3}-[0-9]{4}$",
    "zip": r"^[0-9]{5}(-[0-9]{4})?$",
    "licence": "^[A-Z]{2}[0-9]{2}[A-Z]{3}$",
    "hex colour": "^#[0-9a-fA-F]{6}$",
    "version": r"^[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}$",
    "slug": "^[a-z0-9]+(-[a-z0-9]+){0,2}$",
    "currency": "^(USD|EUR|KRW)$",
    "alternatives": "^(cat|dog|(gold)?fish)$",
    "class": r"^\w{1,5}$",
    "digits class": r"^\d{1,4}$",
    "spaces": r"^a\sb$",
    "quotes": r'^"[a-z]{1,4}"$',
    "backslashes": r"^[a-c]\\[a-c]$",
    "slashes": "^/[a-z]{1,4}/[a-z]{1,4}$",
    "unicode": "^[가-힣]{1,4}$",
    "accents": "^[àâéè]{1,3}$",
    "start only": "^ab.{0,3}$",
    "dots": r"^[^@]{1,6}@[^@]{1,6}\.com$",
    "time": "^([01][0-9]|2[0-3]):[0-5][0-9]$",
    "isbn": "^97[89]-[0-9]{10}$",
    "base64": "^([A-Za-z0-9+/]{4}){0,3}$",
    "repeated": "^(ab){2,4}$",
    "optional": "^a?b?c?$",
    "negated": '^[^"\\\\\\x00-\\x1f]{1,6}$',
}
LENGTHS = [(0, 0), (1, 1), (0, 5), (3, 3), (2, 6), (10, 20), (0, 40)]
FORMATS = ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# Of these, texts have a length of their own; the others may go on for ever.
SHORT_FORMATS = {"date", "ipv4", "ipv6", "uuid"}
INTEGERS: dict[str, dict[str, Any]] = {
    "digit": {"minimum": 0, "maximum": 9},
    "one": {"minimum": 5, "maximum": 5},
    "negative": {"minimum": -20, "maximum": -3},
    "around zero": {"minimum": -3, "maximum": 3},
    "percent": {"minimum": 0, "maximum": 100},
    "large": {"minimum": 1_000_000, "maximum": 2_000_000},
    "exclusive": {"exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "half open": {"minimum": 10, "exclusiveMaximum": 20},
    "odd bounds": {"minimum": 17, "maximum": 4321},
    "32 bits": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "sevens": {"minimum": 0, "maximum": 100, "multipleOf": 7},
    "hundreds": {"minimum": 100, "maximum": 900, "multipleOf": 100},
    "years": {"minimum": 1900, "maximum": 2100},
    "float bounds": {"minimum": 0.5, "maximum": 9.5},
}
NUMBERS: dict[str, dict[str, Any]] = {
    "unit": {"minimum": 0, "maximum": 1},
    "exclusive unit": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "temperature": {"minimum": -40, "maximum": 60},
    "latitude": {"minimum": -90, "maximum": 90},
    "small": {"minimum": 0.001, "maximum": 0.002},
    "negative": {"minimum": -1.5, "maximum": -0.5},
    "halves": {"minimum": 0, "maximum": 10, "multipleOf": 0.5},
    "quarters": {"minimum": 0, "maximum": 2, "multipleOf": 0.25},
    "price": {"minimum": 0.01, "maximum": 999.99},
}


def _strings() -> list[Case]:
    cases = [Case(f"length {a} to {b}", {"type": "string", "minLength": a, "maxLength": b}) for a, b in LENGTHS]
    cases += [Case(f"pattern {name}", {"type": "string", "pattern": pattern}) for name, pattern in PATTERNS.items()]
    return [
        *cases,
        Case("pattern within a length", {"type": "string", "pattern": "^[a-z]+$", "maxLength": 5}),
        Case("pattern over a length", {"type": "string", "pattern": "^[a-z]+$", "minLength": 4, "maxLength": 7}),
        Case("any string", {"type": "string"}, bounded=False),
        Case("long string", {"type": "string", "minLength": 20}, bounded=False),
        Case("unbounded pattern", {"type": "string", "pattern": "^[a-z ]+$"}, bounded=False),
        Case("pattern anywhere", {"type": "string", "pattern": "ab"}, bounded=False),
    ]


def _formats() -> list[Case]:
    """In an object as they are used; those that may be long, once bounded and once not."""
    cases = []
    for name in FORMATS:
        short = name in SHORT_FORMATS
        cases.append(Case(f"format {name}", record({"value": {"type": "string", "format": name}}), bounded=short))
        if not short:
            cases.append(Case(f"short {name}", {"type": "string", "format": name, "maxLength": 40}))
    dates = {"from": {"type": "string", "format": "date"}, "to": nullable({"type": "string", "format": "date"})}
    return [*cases, Case("two dates", record(dates))]


def _numbers() -> list[Case]:
    cases = [Case(f"integer {name}", {"type": "integer", **limits}) for name, limits in INTEGERS.items()]
    cases += [Case(f"number {name}", {"type": "number", **limits}, bounded=False) for name, limits in NUMBERS.items()]
    return [
        *cases,
        Case("any integer", {"type": "integer"}, bounded=False),
        Case("any number", {"type": "number"}, bounded=False),
        Case("at least", {"type": "integer", "minimum": 1000}, bounded=False),
        Case("at most", {"type": "number", "maximum": -1}, bounded=False),
        Case("even", {"type": "integer", "multipleOf": 2}, bounded=False),
    ]


def _types() -> list[Case]:
    return [
        Case("boolean", BOOLEAN),
        Case("null", NULL),
        Case("string or null", {"type": ["string", "null"], "maxLength": 6}),
        Case("integer or boolean", {"type": ["integer", "boolean"], "minimum": 0, "maximum": 50}),
        Case("three types", {"type": ["null", "boolean", "string"], "maxLength": 4}),
        Case("any of string and integer", {"anyOf": [text(5), whole()]}),
        Case("nullable by any of", nullable(text(6))),
        Case("one of types", {"oneOf": [text(5), whole(), NULL]}),
        Case("all of limits", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]}),
        Case("all of lengths", {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 5}]}),
        Case("enum and type", {"type": "string", "enum": ["a", "b", "c"]}),
        Case("enum cut by a type", {"type": "string", "enum": ["a", 1, None, "b"]}),
        Case("enum cut by a minimum", {"enum": [1, 5, 10, 50], "minimum": 5}),
        Case("annotations", text(5, title="T", description="d", default="x", examples=["y"], deprecated=True)),
        Case("anything", {}, bounded=False),
        Case("any object", {"type": "object"}, bounded=False),
        Case("any array", {"type": "array"}, bounded=False),
    ]


def cases() -> list[Case]:
    """All of them."""
    return [
        *(Case(f"const {name}", {"const": value}) for name, value in CONSTANTS.items()),
        *(Case(f"enum {name}", {"enum": values}) for name, values in ENUMS.items()),
        *_strings(),
        *_formats(),
        *_numbers(),
        *_types(),
    ]
