"""Asking for an answer that conforms to a schema, whole or streamed."""

from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from tests.conformance.builders import Schema
from tests.e2e.conftest import MODEL


@dataclass
class Answer:
    """The choices of one request: texts and why each ended. Grows while it is streamed."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    num_chunks: int = field(default=0, compare=False)


def request(name: str, schema: Schema, seed: int, max_tokens: int, n: int = 2) -> dict[str, Any]:
    """Of one answer at temperature 1: what the model would never say by itself is what must be excluded."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Write a JSON document as an example of: {name}"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "example", "schema": schema}},
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": max_tokens,
        "n": n,
    }


async def whole(client: AsyncOpenAI, **body: Any) -> Answer:
    answer = Answer()
    for choice in (await client.chat.completions.create(**body)).choices:
        answer.texts[choice.index] = choice.message.content or ""
        answer.reasons[choice.index] = choice.finish_reason
    return answer


async def stream(client: AsyncOpenAI, answer: Answer, **body: Any) -> Answer:
    async for chunk in await client.chat.completions.create(stream=True, **body):
        answer.num_chunks += 1
        for choice in chunk.choices:
            answer.texts[choice.index] = answer.texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                answer.reasons[choice.index] = choice.finish_reason
    return answer
