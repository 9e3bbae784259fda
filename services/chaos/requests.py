"""The requests of a run: a function of the seed, of all kinds that the API offers. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.request import SamplingParams
from services.common.text import grammar

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MIN_OUTPUT, MAX_OUTPUT = 16, 120
# Where texts cannot be known before (salted), stops that random tokens make every few tokens, also straddling two.
COMMON_STOPS = ("er", "in", "st", "on", "re")
NEVER = "\u2042 never \u2042"  # a second stop string, which only costs the routers work
LEAVE_AFTER = 3
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]},
    {"type": "array", "items": {"enum": ["red", "green", "blue", 7, None]}, "minItems": 3},
    {
        "type": "object",
        "properties": {"value": {"type": "number"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    },
)
# fmt: off
WORDS = (
    "the", "of", "and", "river", "mountain", "signal", "copper", "harbour", "engine", "lantern", "orbit",
    "garden", "winter", "theory", "marble", "window", "paper", "violin", "desert", "random", "kernel", "forest",
    "bridge", "number", "silver", "method", "anchor", "planet", "yellow", "quickly", "under", "between",
    "seven", "twelve", "because", "however", "pattern", "castle", "market", "doctor", "letter", "ocean",
    "music",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Request:
    """One client's request. resume_by: how it continues a broken stream. leave_after: events; then the client goes."""

    index: int
    path: str
    body: dict[str, Any]
    resume_by: str = "get"
    wants_stop: bool = False
    leave_after: int | None = None

    @property
    def is_chat(self) -> bool:
        return self.path == CHAT

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def schema(self) -> dict[str, Any] | None:
        """What its text must be valid under."""
        found: dict[str, Any] | None = self.body.get("structured_outputs", {}).get("json")
        return found

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    def with_stop(self, *stops: str) -> "Request":
        return replace(self, body=self.body | {"stop": list(stops)}, wants_stop=False)


def mix(seed: int, count: int, model: str, salted: bool = False, most_tokens: int = MAX_OUTPUT) -> list[Request]:
    """`count` requests. Every kind is there in any 64; what is drawn are prompts, lengths (of output: at most
    `most_tokens`) and values.

    Stop strings come later (`choose_stop`) unless the run is salted, where common ones are put in here.
    """
    rng = random.Random(f"requests {seed}")
    kinds = list(range(count))
    rng.shuffle(kinds)
    requests = [_request(index, kind, rng, model, most_tokens) for index, kind in enumerate(kinds)]
    if not salted:
        return requests
    return [r.with_stop(rng.choice(COMMON_STOPS), NEVER) if r.wants_stop else r for r in requests]


def leavers(seed: int, count: int, model: str, first_index: int) -> list[Request]:
    """Clients that go away in the middle, so that aborts are under way when faults come."""
    rng = random.Random(f"leavers {seed}")
    # Kind 1 and its like are streamed and as long as any.
    made = [_request(first_index + i, 2 * i, rng, model) for i in range(count)]
    return [replace(r, body=_streamed(r.body, MAX_OUTPUT), leave_after=LEAVE_AFTER, wants_stop=False) for r in made]


def poisoned(index: int, model: str, token: int) -> Request:
    """A request that kills the worker that runs it (see the fake executor)."""
    body = {"model": model, "prompt": [300, 301, token], "max_tokens": 20, "temperature": 0, "stream": True}
    return Request(index, COMPLETIONS, body)


def _streamed(body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    return body | {"stream": True, "max_tokens": max_tokens, "ignore_eos": True}


def _prompt(rng: random.Random, is_long: bool) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(110, 220) if is_long else rng.randint(3, 30)))


def _request(index: int, kind: int, rng: random.Random, model: str, most_tokens: int = MAX_OUTPUT) -> Request:
    """The periods are chosen so that the kinds also meet each other."""
    is_chat = kind % 2 == 0
    body: dict[str, Any] = {"model": model, "seed": rng.randrange(1 << 31)}
    prompt = _prompt(rng, kind % 4 == 3 or kind % 16 == 6)
    if is_chat:
        body["messages"] = [{"role": "user", "content": prompt}]
        if rng.random() < 0.3:
            body["messages"].insert(0, {"role": "system", "content": _prompt(rng, False)})
    else:
        body["prompt"] = prompt
    max_tokens = rng.randint(MIN_OUTPUT, most_tokens)
    body["max_tokens"] = max_tokens
    body["ignore_eos"] = rng.random() < 0.7
    body |= _sampling(kind, rng, max_tokens)
    body |= _output(kind, rng, is_chat)
    return Request(
        index,
        CHAT if is_chat else COMPLETIONS,
        body,
        resume_by=rng.choice(("get", "get", "post")),
        wants_stop=kind % 5 == 1 and "structured_outputs" not in body,
    )


def _sampling(kind: int, rng: random.Random, max_tokens: int) -> dict[str, Any]:
    out: dict[str, Any] = {"temperature": 0}
    if kind // 2 % 2:
        out = {"temperature": round(rng.uniform(0.5, 1.2), 2), "top_p": round(rng.uniform(0.7, 1.0), 2)}
        if rng.random() < 0.5:
            out["top_k"] = rng.randint(5, 200)
    if kind % 8 == 5:
        out["presence_penalty"] = round(rng.uniform(-1, 1), 1)
        out["frequency_penalty"] = round(rng.uniform(-1, 1), 1)
    if kind % 8 == 6:
        out["repetition_penalty"] = round(rng.uniform(1.0, 1.5), 2)
    if kind % 9 == 4:
        out["min_tokens"] = rng.randint(4, max_tokens)
    if kind % 9 == 7:
        out["structured_outputs"] = {"json": rng.choice(SCHEMAS)}
    if kind % 10 == 7:
        out["logit_bias"] = {str(rng.randint(1000, 9000)): round(rng.uniform(-10, 10), 1) for _ in range(3)}
    return out


def _output(kind: int, rng: random.Random, is_chat: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"n": 2} if kind % 7 == 3 else {}
    if kind % 6 == 2:
        top = rng.randint(0, 3)
        out |= {"logprobs": True, "top_logprobs": top} if is_chat else {"logprobs": top}
    if kind % 12 == 9:  # a completion, since kinds of chat are even
        out |= {"logprobs": rng.randint(0, 3)}
    if kind % 16 not in (9, 14):
        out["stream"] = True
        if kind % 3:
            out["stream_options"] = {"include_usage": True}
    return out


def choose_stop(pieces: Sequence[str], rng: random.Random) -> str | None:
    """A string that the text has, from the end of one piece into the next: no single token completes it alone.

    pieces: the text as it was streamed; of an answer in one piece, any place will do. None if there is no such place
    in its second half.
    """
    if len(pieces) == 1:
        pieces = [pieces[0][i : i + 4] for i in range(0, len(pieces[0]), 4)]
    places = [i for i in range(len(pieces) // 2, len(pieces) - 1) if len(pieces[i]) > 1 and len(pieces[i + 1]) > 1]
    rng.shuffle(places)
    for place in places:
        stop = pieces[place][-3:] + pieces[place + 1][:2]
        if "\ufffd" not in stop and stop.isprintable() and stop.strip():
            return stop
    return None


def params_of(request: Request) -> SamplingParams:
    """As the router makes them, of the fields that the fake executor and the end rules look at."""
    body = request.body
    wants = body.get("logprobs")
    schema = request.schema
    logprobs = (body.get("top_logprobs", 0) if wants else None) if request.is_chat else wants
    return SamplingParams(
        max_tokens=body["max_tokens"],
        seed=body.get("seed", 0),
        temperature=body["temperature"],
        min_tokens=body.get("min_tokens", 0),
        ignore_eos=body.get("ignore_eos", False),
        stop=tuple(body.get("stop", ())),
        logprobs=logprobs,
        grammar="" if schema is None else grammar.of_schema(schema),
    )
