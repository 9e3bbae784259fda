"""The requests that every server gets: lengths by seed, prompts cut out of prose that ships with Python."""

import math
import pydoc_data.topics
import random
import re
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Tokenizer

from services.common.models.resolve import resolve_model
from services.common.settings import DEFAULT_MODEL
from services.common.text.tokenizer import TextEncoder

SHARED_PREFIX = 512


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: token ids. Exactly num_output tokens are asked for."""

    prompt: list[int]
    num_output: int


def _prose() -> str:
    topics = (pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    paragraphs = (re.sub(r"\s+", " ", text).strip() for topic in topics for text in topic.split("\n\n"))
    return "\n\n".join(text for text in paragraphs if len(text) > 80 and "::=" not in text)


class Prompts:
    """Pieces of prose, no two of which begin alike."""

    def __init__(self, seed: int) -> None:
        self._ids = TextEncoder(resolve_model(DEFAULT_MODEL).tokenizer_json).encode_raw(_prose())
        self._rng = random.Random(seed)
        self._used: set[int] = set()

    def cut(self, length: int) -> list[int]:
        while (start := self._rng.randrange(len(self._ids) - length)) in self._used:
            pass
        self._used.add(start)
        return self._ids[start : start + length]


def _lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return max(low, min(high, round(median * math.exp(rng.gauss(0.0, sigma)))))


def orca(count: int, seed: int = 0) -> list[Request]:
    """Prompts of 32 to 512 tokens and outputs of 1 to 128, uniform (Orca, OSDI'22, section 6)."""
    rng, prompts = random.Random(seed), Prompts(1 + 10 * seed)
    return [Request(prompts.cut(rng.randint(32, 512)), rng.randint(1, 128)) for _ in range(count)]


def chat(count: int, seed: int = 0) -> list[Request]:
    """Heavy tails, as of chats: lognormal, medians 100 and 120, at most 1,024 and 512."""
    rng, prompts = random.Random(seed), Prompts(2 + 10 * seed)
    return [
        Request(prompts.cut(_lognormal(rng, 100, 1.0, 8, 1024)), _lognormal(rng, 120, 0.8, 4, 512))
        for _ in range(count)
    ]


def shared(count: int, seed: int = 0) -> list[Request]:
    """One prefix of 512 tokens, then 8 to 48 of each request's own; outputs of 16 to 96."""
    rng, prompts = random.Random(seed), Prompts(3 + 10 * seed)
    prefix = prompts.cut(SHARED_PREFIX)
    return [Request(prefix + prompts.cut(rng.randint(8, 48)), rng.randint(16, 96)) for _ in range(count)]


def fixed(count: int, seed: int = 0) -> list[Request]:
    """128 in, 64 out."""
    prompts = Prompts(4 + 10 * seed)
    return [Request(prompts.cut(128), 64) for _ in range(count)]


@lru_cache(1)
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_str(resolve_model(DEFAULT_MODEL).tokenizer_json)


def text_of(prompt: list[int]) -> str:
    """For a server that takes no token ids; to it the prompt may be a token longer or shorter."""
    text: str = _tokenizer().decode(prompt)
    return text


TRACES = {"orca": orca, "chat": chat, "shared": shared, "fixed": fixed}
