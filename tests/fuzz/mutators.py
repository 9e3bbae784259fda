"""Seeded damage to valid requests: to their JSON, to their bytes, and to the HTTP around them.

Every mutator is a function of a random generator and a seed, and gives the raw bytes to send.
"""

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

from tests.fuzz.corpus import Seed

Mutator = Callable[[random.Random, Seed, list[Seed]], bytes]

NUMBERS = (
    *("0", "-1", "-0", "-0.0", "1.5", "1e2", "1E400", "-1e999", "1e-400", "NaN", "Infinity", "-Infinity", "01", "+1"),
    *("0x10", "1_000", "1e", ".5", "5.", "2147483647", "2147483648", "4294967296", "9223372036854775807", "true"),
    *("9223372036854775808", "18446744073709551616", "-9223372036854775809", "9" * 400, "1" + "0" * 5000, '"5"'),
    *("null", "[]", "{}", "128", "129", "20", "21", "0.1" + "0" * 300 + "1", "49151", "49152"),
)
TEXTS = (
    *("\\u0000", "\\ud800", "\\udfff\\ud800", "\\ud83d\\ude00", "\\uFFFF", "\\u202e", "\\x41", "\\", '"', "\\n", "\t"),
    *("\u200d\u200d", "\u0301" * 500, "\ufeff", "\U0001f40b", "\ue000", "\U0010ffff", "<|im_end|>", "<|im_start|>"),
    *("<|endoftext|>", "\x00", "\x7f", "\u2028", "{{7*7}}", "{% for x in y %}", "%s%n", "../../etc/passwd", "' OR 1=1"),
)
BYTES = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b"\x00", b"\xfe\xff", b"\x1f\x8b")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 1 << 31, 1 << 63, 10**30, "", "a", "5", [], {}, [[]], [{}], [None], [0], [""]),
    *({"": None}, {"type": "text"}, {"type": "function"}, {"a": {"b": {"c": []}}}, "x" * 5000, ["a"] * 300, [1] * 3000),
)
NAMES = ("", "a", "__proto__", "__class__", "constructor", "type", "model", "\u00e9", "a.b", "$ref", "x" * 3000, "\0")
LENGTHS = (
    b"-1",
    b"+5",
    b"0x10",
    b"5 5",
    b"",
    b"abc",
    b"1.0",
    b"1e3",
    b"9" * 30,
    b"0",
    b"1",
    b"\xb2",
    b"5, 5",
    b"00003",
)
ENCODINGS = (b"chunked", b"Chunked", b"gzip, chunked", b"chunked, gzip", b"identity", b"xchunked", b" chunked ", b"")
VERSIONS = (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1.1", b"HTP/1.1", b"", b"http/1.1", b"HTTP/1.")
METHODS = (
    *(b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"PRI", b"post"),
    *(b"A" * 300, b"G\xffT", b"", b"GET ", b"PROPFIND", b"M-SEARCH", b"QUERY"),
)
TARGETS = (
    *(b"http://127.0.0.1%s", b"http://other.example:99999%s", b"*", b"//%s", b"%s?a=b&%%zz=%%", b"%s?" + b"q" * 5000),
    *(b"%s/", b"%s%%00", b"%s/../%s", b"%s%%2e%%2e", b"%s\xff", b"%s%%ff", b"%s#a", b"/" + b"a" * 70_000, b"%s;a", b""),
    *(b"/v1/models/%%ff%%00", b"/v1/streams/%%2f%%2f", b"/v1/models/" + b"a" * 3000, b"127.0.0.1:80", b"\\%s"),
)
HEADERS = (
    *(b"Host", b"Content-Type", b"Accept", b"Authorization", b"X-Request-Id", b"Idempotency-Key", b"Last-Event-ID"),
    *(b"X-Orca-Resumable", b"X-Orca-Timeout", b"traceparent", b"Connection", b"Expect", b"Upgrade", b"Range", b"TE"),
    *(b"Content-Encoding", b"Cookie", b"X-Api-Key", b"anthropic-version", b"Origin", b"X-Forwarded-For", b"Trailer"),
    *(b"Accept-Encoding", b"If-None-Match", b"Content-Range", b"Sec-WebSocket-Key", b"X-HTTP-Method-Override", b""),
)
HEADER_VALUES = (
    *(b"", b"\xff\xfe", b"\xc3\xa9", b"a" * 5000, b"a" * 70_000, b"Bearer ", b"Bearer " + b"k" * 300, b"Basic !!!!"),
    *(b"100-continue", b"h2c", b"websocket", b"close", b"keep-alive, Upgrade", b"gzip", b"br", b"text/plain", b"*/*"),
    *(b"application/json; charset=utf-16", b"multipart/form-data", b"bytes=0-1", b"0", b"-1", b"nan", b"1e400", b"inf"),
    *(b"1:none:2:3", b"5.5:" + b"a" * 32 + b":1", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00", b"'", b"\x7f", b"\t"),
    *(b"true", b"a,b", b"%00", b"\xe2\x80\xae", b"; ; ;", b"0.0000001", b"1", b"00:1", b":::::", b"1-1"),
)


# -- the body


def _json(seed: Seed) -> Any:
    return copy.deepcopy(seed.fields)


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += _places(inner)
    return found


def _structural(change: Callable[[random.Random, Any, Any], None]) -> Mutator:
    """A mutator of the parsed body at one random place; what has no JSON body gets one."""

    def mutate(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
        fields = _json(seed) or {"model": "a", "prompt": ["b"]}
        change(rng, *rng.choice(_places(fields)))
        return seed.raw(_dump(fields))

    return mutate


def _replace(rng: random.Random, where: Any, key: Any) -> None:
    where[key] = copy.deepcopy(rng.choice(VALUES))


def _remove(_: random.Random, where: Any, key: Any) -> None:
    del where[key]


def _rename(rng: random.Random, where: Any, key: Any) -> None:
    if isinstance(where, dict):
        where[rng.choice(NAMES)] = where.pop(key)
    else:
        where.append(where[key])


def _nest(rng: random.Random, where: Any, key: Any) -> None:
    """As deep as json.dumps can; the deepest are made of bytes, below."""
    value = where[key]
    for _ in range(rng.choice((1, 2, 10, 100, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    where[key] = value


def _repeat(rng: random.Random, where: Any, key: Any) -> None:
    value = where[key]
    times = rng.choice((2, 20, 200, 3000))
    if isinstance(value, str | list) and len(_dump(value)) * times < 200_000:
        where[key] = value * times
    else:
        where[key] = [value] * rng.choice((1, 2, 130))


def _insert_text(rng: random.Random, where: Any, key: Any) -> None:
    value = str(where[key])
    at = rng.randrange(len(value) + 1)
    where[key] = value[:at] + rng.choice(TEXTS) * rng.choice((1, 1, 3, 100)) + value[at:]


def number(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """A number of the body becomes one that parsers disagree about."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", seed.body))
    if not found:
        return seed.raw(b'{"n":' + rng.choice(NUMBERS).encode() + b"}")
    match = rng.choice(found)
    return seed.raw(seed.body[: match.start()] + rng.choice(NUMBERS).encode() + seed.body[match.end() :])


def raw_text(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """Text or bad bytes anywhere in the body, without escaping."""
    at = rng.randrange(len(seed.body) + 1)
    what = rng.choice((*BYTES, *(text.encode() for text in TEXTS)))
    return seed.raw(seed.body[:at] + what + seed.body[at:])


def deep(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """Nesting that no parser should follow with its stack."""
    depth = rng.choice((500, 1030, 20_000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"":', b"}]")))
    closed = depth if rng.random() < 0.7 else 0
    value = opening * depth + b"1" + closing * closed
    return seed.raw(re.sub(rb'"Hi"|"a b"|\[', lambda _: value, seed.body, count=1) or value)


def twice(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """A key that is there twice, with two values."""
    if not seed.fields:
        return seed.raw(b'{"a":1,"a":2}')
    key = rng.choice(list(seed.fields))
    value = _dump(rng.choice(VALUES))
    first = rng.random() < 0.5
    extra = _dump(key) + b":" + value
    return seed.raw(b"{" + extra + b"," + seed.body[1:] if first else seed.body[:-1] + b"," + extra + b"}")


# -- bytes


def bit_flips(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    data = bytearray(seed.raw())
    for _i in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def body_flips(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """In the body alone, so that it is the body that is read."""
    data = bytearray(seed.body or b"{}")
    for _i in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return seed.raw(bytes(data))


def truncated(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    data = seed.raw()
    return data[: rng.randrange(1, len(data))]


def short_body(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """Cut, and announced as it is."""
    return seed.raw(seed.body[: rng.randrange(len(seed.body) + 1)])


def duplicated(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """A stretch of the bytes, twice or many times."""
    data = seed.raw()
    start, stop = sorted((rng.randrange(len(data)), rng.randrange(len(data) + 1)))
    return data[:stop] + data[start:stop] * rng.choice((1, 1, 5, 50)) + data[stop:]


def spliced(rng: random.Random, seed: Seed, others: list[Seed]) -> bytes:
    """The beginning of one body with the end of another."""
    other = rng.choice(others)
    return seed.raw(seed.body[: rng.randrange(len(seed.body) + 1)] + other.body[rng.randrange(len(other.body) + 1) :])


def swapped(rng: random.Random, seed: Seed, others: list[Seed]) -> bytes:
    """The body of one route sent to another."""
    return seed.raw(rng.choice(others).body)


def noise(rng: random.Random, _: Seed, __: list[Seed]) -> bytes:
    """No HTTP at all."""
    preface = rng.choice(
        (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"\r\n\r\n")
    )
    return preface + rng.randbytes(rng.choice((1, 10, 1000)))


# -- HTTP


def length(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """A Content-Length that is wrong, or there twice."""
    head = [pair for pair in seed.headers(seed.body) if pair[0] != b"Content-Length"]
    right = str(len(seed.body)).encode()
    near = str(max(0, len(seed.body) + rng.choice((-5, -1, 1, 5)))).encode()
    wrong = rng.choice((*LENGTHS, near, near, str(rng.choice((5 << 20, 200 << 20, 1 << 62))).encode()))
    both = rng.choice(([wrong], [right, wrong], [wrong, right], [right, right]))
    return seed.raw(head=head + [(b"Content-Length", value) for value in both])


def _chunks(rng: random.Random, body: bytes) -> bytes:
    """Chunked, sometimes as the standard has it."""
    cut = rng.randrange(len(body) + 1)
    out = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part)
    end = rng.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX-Trailer: a\r\n\r\n", b"", b"0\r\n", b"00000\r\n\r\n"))
    kind = rng.randrange(8)
    if kind == 0:
        out = out.replace(b"\r\n", b";a=b\r\n", 1)
    elif kind == 1:
        out = b"%x\r\n" % rng.choice((1 << 31, 1 << 63, 1 << 64, 10**30)) + body
    elif kind == 2:
        out = rng.choice((b"zz\r\n", b"-1\r\n", b"0x5\r\n", b" 5\r\n", b"\r\n", b";\r\n", b"5" * 5000)) + body
    elif kind == 3:
        out = b"".join(b"1\r\n%c\r\n" % byte for byte in body[:2000])
    return out + end


def transfer(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """Chunked bodies, well and badly; with and without a Content-Length beside it."""
    keep = rng.random() < 0.3
    head = [pair for pair in seed.headers(seed.body) if keep or pair[0] != b"Content-Length"]
    value = b"chunked" if rng.random() < 0.6 else rng.choice(ENCODINGS)
    return seed.raw(_chunks(rng, seed.body), [*head, (b"Transfer-Encoding", value)])


def header(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """A header more, with a value that is odd."""
    pair = (rng.choice(HEADERS), rng.choice(HEADER_VALUES))
    head = seed.headers(seed.body)
    if rng.random() < 0.5:
        head = [(name, value) for name, value in head if name != pair[0]]
    head.insert(rng.randrange(len(head) + 1), pair)
    return seed.raw(head=head)


def many_headers(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    more = [(b"X-%d" % index, b"v" * rng.choice((1, 50))) for index in range(rng.choice((50, 500, 5000)))]
    return seed.raw(head=[*seed.headers(seed.body), *more])


def broken_head(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """Lines that are no headers."""
    line = rng.choice(
        (
            b"no colon",
            b"A : b",
            b" folded: x",
            b"A: b\r\n c",
            b"A:\x00b",
            b"A\x00: b",
            b": b",
            b"A: b\rC: d",
            b"A: b\nC: d",
        )
    )
    head, _sep, body = seed.raw().partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    lines.insert(rng.randrange(len(lines) + 1), line)
    end = rng.choice((b"\r\n", b"\r\n", b"\n", b"\r"))
    return end.join(lines) + end + end + body


def no_host(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    head = [pair for pair in seed.headers(seed.body) if pair[0] != b"Host"]
    return seed.raw(head=head if rng.random() < 0.5 else [(b"Host", b"a"), (b"Host", b"b"), *head])


def request_line(rng: random.Random, seed: Seed, _: list[Seed]) -> bytes:
    """Another method, target or version."""
    method, target, version = seed.method.encode(), seed.path.encode(), b"HTTP/1.1"
    kind = rng.randrange(3)
    if kind == 0:
        method = rng.choice(METHODS)
    elif kind == 1:
        pattern = rng.choice(TARGETS)
        target = pattern.replace(b"%s", target).replace(b"%%", b"%")
    else:
        version = rng.choice(VERSIONS)
    rest = seed.raw().partition(b"\r\n")[2]
    return b" ".join((method, target, version)) + b"\r\n" + rest


def pipelined(rng: random.Random, seed: Seed, others: list[Seed]) -> bytes:
    """Some requests at once on one connection; the last may be cut."""
    data = seed.raw() + b"".join(rng.choice(others).raw() for _i in range(rng.choice((1, 2, 4))))
    return data if rng.random() < 0.7 else data[: rng.randrange(len(seed.raw()), len(data))]


MUTATORS: dict[str, Mutator] = {
    "replace": _structural(_replace),
    "remove": _structural(_remove),
    "rename": _structural(_rename),
    "nest": _structural(_nest),
    "repeat": _structural(_repeat),
    "insert text": _structural(_insert_text),
    "number": number,
    "raw text": raw_text,
    "deep": deep,
    "twice": twice,
    "bit flips": bit_flips,
    "body flips": body_flips,
    "truncated": truncated,
    "short body": short_body,
    "duplicated": duplicated,
    "spliced": spliced,
    "swapped": swapped,
    "noise": noise,
    "length": length,
    "transfer": transfer,
    "header": header,
    "many headers": many_headers,
    "broken head": broken_head,
    "no host": no_host,
    "request line": request_line,
    "pipelined": pipelined,
}


def mutated(run: int, index: int, all_seeds: list[Seed]) -> tuple[str, bytes]:
    """Case `index` of a run: what was done to what, and the bytes. The same numbers give the same bytes."""
    rng = random.Random(f"{run}:{index}")
    name = rng.choice(list(MUTATORS))
    seed = rng.choice(all_seeds)
    return f"{name} of {seed.name}", MUTATORS[name](rng, seed, all_seeds)
