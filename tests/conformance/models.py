"""Schemas as applications have them: pydantic models, as clients send them, and records of everyday formats."""

from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field

from tests.conformance.builders import BOOLEAN, Case, items, nullable, one_of, record, ref, text, whole

Short = Annotated[str, Field(max_length=8)]
Few = Field(max_length=3)
DATE = {"type": "string", "format": "date"}


class Priority(Enum):
    low = "low"
    high = "high"


class Step(BaseModel):
    explanation: Short
    output: Short


class MathAnswer(BaseModel):
    """OpenAI's example of structured outputs."""

    steps: Annotated[list[Step], Few]
    final_answer: Short


class CalendarEvent(BaseModel):
    name: Short
    day: date
    participants: Annotated[list[Short], Few]


class Contact(BaseModel):
    name: Short
    age: Annotated[int, Field(ge=0, le=150)]
    email: Annotated[str, Field(pattern="^[a-z]{1,8}@[a-z]{1,8}[.]com$")] | None = None


class Task(BaseModel):
    id: UUID
    title: Short
    priority: Priority = Priority.low
    done: bool = False
    owner: Contact | None = None


class Comment(BaseModel):
    author: Short
    replies: Annotated[list["Comment"], Field(max_length=2)]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    trained: bool


class Owner(BaseModel):
    pets: Annotated[list[Annotated[Cat | Dog, Field(discriminator="kind")]], Few]


class Weather(BaseModel):
    city: Literal["Vienna", "Seoul", "Paris"]
    unit: Literal["c", "f"] | None
    days: Annotated[int, Field(ge=1, le=7)]


class Mood(BaseModel):
    label: Literal["positive", "neutral", "negative"]
    stars: Literal[1, 2, 3, 4, 5]
    why: Short | None


class Range(BaseModel):
    low: Annotated[int, Field(ge=0, le=9)]
    high: Annotated[int, Field(gt=9, lt=100)]


class Grid(BaseModel):
    cells: tuple[bool, bool, Short]
    ranges: dict[Literal["x", "y"], int] = {}


class Everything(BaseModel):
    """Many kinds of fields in one."""

    text: Short
    count: Annotated[int, Field(ge=0, le=99)]
    flag: bool
    kind: Priority
    maybe: Annotated[int, Field(ge=0, le=9)] | None
    either: Annotated[int, Field(ge=0, le=9)] | Short
    inner: Range
    several: Annotated[list[Range], Few]


MODELS = (MathAnswer, CalendarEvent, Contact, Task, Comment, Owner, Weather, Mood, Range, Everything)
STRICT = (MathAnswer, CalendarEvent, Contact, Task, Comment, Weather, Mood, Range, Everything)
RECURSIVE = {Comment}


def _models() -> list[Case]:
    """As pydantic makes them, and as the openai client makes them strict."""
    plain = [(f"pydantic {m.__name__}", m.model_json_schema(), m) for m in MODELS]
    strict = [(f"strict {m.__name__}", to_strict_json_schema(m), m) for m in STRICT]
    return [Case(name, schema, "strict" in name and m not in RECURSIVE) for name, schema, m in (*plain, *strict)]


def _records() -> dict[str, dict[str, Any]]:
    address = record({"street": text(10), "city": text(8), "zip": {"type": "string", "pattern": "^[0-9]{4,5}$"}})
    user = record({"login": text(8), "id": whole(1, 9999), "site_admin": BOOLEAN})
    money = record({"amount": whole(0, 99999), "currency": one_of("EUR", "USD", "KRW")})
    line = record({"item": text(8), "quantity": whole(1, 99), "unit_price": money})
    hour = {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"}
    position = items(whole(-90, 90), 2, 2)
    entity = record({"text": text(8), "label": one_of("PER", "ORG", "LOC"), "start": whole(), "end": whole()})
    return {
        "github issue": record(
            {
                "number": whole(1, 9999),
                "title": text(20),
                "state": one_of("open", "closed"),
                "labels": items(record({"name": text(8), "color": {"type": "string", "pattern": "^[0-9a-f]{6}$"}})),
                "assignee": nullable(user),
                "user": user,
                "closed_at": nullable(DATE),
            }
        ),
        "recipe": record(
            {
                "name": text(15),
                "serves": whole(1, 12),
                "ingredients": items(record({"name": text(8), "grams": whole(1, 999)}), 1, 4),
                "steps": items(text(20), 1, 4),
                "vegan": BOOLEAN,
            }
        ),
        "invoice": record(
            {
                "number": {"type": "string", "pattern": "^INV-[0-9]{5}$"},
                "issued": DATE,
                "seller": address,
                "buyer": ref("address"),
                "lines": items(line, 1, 3),
                "paid": BOOLEAN,
            }
        )
        | {"$defs": {"address": address}},
        "geojson point": record({"type": {"const": "Point"}, "coordinates": position}),
        "geojson line": record({"type": {"const": "LineString"}, "coordinates": items(position, 2, 3)}),
        "calendar event": record(
            {
                "summary": text(12),
                "day": DATE,
                "begins": hour,
                "ends": nullable(hour),
                "repeats": one_of("never", "daily", "weekly"),
                "attendees": items(record({"name": text(8), "accepted": nullable(BOOLEAN)})),
            }
        ),
        "address": address,
        "product": record(
            {
                "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                "name": text(12),
                "price": money,
                "tags": items(text(6)),
                "stock": record({"warehouse": one_of("north", "south"), "count": whole()}, ["count"]),
                "size": one_of("S", "M", "L", "XL", None),
            },
            ["sku", "name", "price"],
        ),
        "person": record({"given": text(8), "family": text(8), "born": DATE, "children": whole(0, 9)}),
        "http request": record(
            {
                "method": one_of("GET", "POST", "PUT", "DELETE"),
                "path": {"type": "string", "pattern": "^(/[a-z]{1,6}){1,3}$"},
                "status": whole(100, 599),
                "secure": BOOLEAN,
            }
        ),
        "log line": record({"level": one_of("DEBUG", "INFO", "ERROR"), "at": hour, "message": text(20)}),
        "entities": record({"entities": items(entity, 0, 4)}),
        "classification": record({"label": one_of(*(f"class {i}" for i in range(20))), "certain": BOOLEAN}),
        "sql plan": record({"table": text(8), "columns": items(text(6), 1, 4), "limit": nullable(whole(1, 100))}),
        "flight": record(
            {
                "from": {"type": "string", "pattern": "^[A-Z]{3}$"},
                "to": {"type": "string", "pattern": "^[A-Z]{3}$"},
                "day": DATE,
                "departs": hour,
                "seats": items({"type": "string", "pattern": "^[0-9]{1,2}[A-F]$"}, 1, 3),
            }
        ),
        "bank transfer": record({"iban": {"type": "string", "pattern": "^AT[0-9]{18}$"}, "money": money}),
        "movie review": record(
            {"title": text(12), "stars": whole(1, 5), "pros": items(text(8)), "cons": items(text(8))}
        ),
        "resume": record(
            {
                "name": text(10),
                "jobs": items(
                    record({"employer": text(8), "from": whole(1950, 2030), "to": nullable(whole(1950, 2030))})
                ),
                "skills": items(one_of("python", "go", "rust", "sql")),
            }
        ),
        "chess move": {"type": "string", "pattern": "^([KQRBN]?[a-h]?x?[a-h][1-8][+#]?|O-O(-O)?)$"},
        "tool call": record(
            {"name": one_of("search", "open"), "arguments": record({"query": text(10), "top": whole(1, 9)})}
        ),
        "container": record(
            {
                "image": {"type": "string", "pattern": "^[a-z]{2,8}:[0-9]{1,2}$"},
                "ports": items(whole(1, 65535)),
                "restart": one_of("no", "always", "on-failure"),
                "limits": record({"cpu": whole(1, 64), "memory_mb": whole(16, 65536)}, []),
            }
        ),
        "quiz": record({"question": text(15), "choices": items(text(6), 4, 4), "answer": whole(0, 3)}),
        "translation": record({"source": one_of("en", "de"), "target": one_of("ko", "fr"), "text": text(15)}),
        "sensor": record(
            {"id": {"type": "string", "format": "uuid"}, "ok": BOOLEAN, "readings": items(whole(-50, 50), 1, 6)}
        ),
        "network": record(
            {
                "address": {"type": "string", "format": "ipv4"},
                "port": whole(1, 65535),
                "v6": nullable({"type": "string", "format": "ipv6"}),
            }
        ),
    }


def cases() -> list[Case]:
    """All of them."""
    return [*_models(), *(Case(name, schema) for name, schema in _records().items())]
