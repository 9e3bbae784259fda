"""The real weights through real processes and the official client."""

import asyncio
import random
from typing import Any

import pytest
from openai import AsyncOpenAI

from loadtest.up import Up
from services.common.redis.store import Store, connect
from tests.e2e.conftest import MODEL, eventually

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = ["The capital of France is", "def add(a, b):", "1, 2, 3, 4,", "안녕하세요", "Once upon a time"]


async def test_a_sensible_answer(real_client: AsyncOpenAI) -> None:
    answer = await real_client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=30)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


async def test_mean_batch_under_24_concurrent_requests(
    real_up: Up, real_client: AsyncOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps are shared: one model call each, most of the 24 in it."""
    before = real_up.metrics()
    await asyncio.gather(
        *(
            real_client.completions.create(
                model=MODEL, prompt=f"{i} and", max_tokens=24, extra_body={"ignore_eos": True}
            )
            for i in range(24)
        )
    )
    after = real_up.metrics()

    def grown(name: str) -> float:
        return after[f'{name}{{worker="worker-0"}}'] - before[f'{name}{{worker="worker-0"}}']

    mean = grown("orca_step_sequences_sum") / grown("orca_step_sequences_count")
    with capsys.disabled():
        print(f"\nmean batch under 24 concurrent requests: {mean:.1f} sequences")
    assert mean > 12
    assert grown("orca_steps_total") == grown("orca_model_calls_total")


async def test_100_streams_with_random_disconnects(real_up: Up, real_client: AsyncOpenAI) -> None:
    """Every finished text is right; afterwards nothing is left but journals within their retention."""
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    want = [(await real_client.completions.create(prompt=prompt, **options)).choices[0].text for prompt in PROMPTS]
    rng = random.Random(5)

    async def one(index: int, leave_after: int | None) -> str | None:
        stream = await real_client.completions.create(prompt=PROMPTS[index % 5], stream=True, **options)
        text, count = "", 0
        async for chunk in stream:
            text += chunk.choices[0].text
            count += 1
            if leave_after is not None and count >= leave_after:
                await stream.close()
                return None
        return text

    leaves = [rng.randrange(1, 12) if rng.random() < 0.3 else None for _ in range(100)]
    assert 20 <= sum(leave is not None for leave in leaves) <= 40
    texts = await asyncio.gather(*(one(index, leave) for index, leave in enumerate(leaves)))
    wrong = [i for i, text in enumerate(texts) if text is not None and text != want[i % 5]]
    assert not wrong
    assert sum(text is not None for text in texts) >= 60
    await eventually(real_up.is_idle, within_s=5)
    store = Store(connect(real_up.redis_url), "default")
    assert await store.num_requests() == 0
    for key in await store._redis.keys("*"):
        kept_for_ever = key.decode().rsplit("}:", 1)[1] in ("requests", "epoch", "generation")
        assert kept_for_ever or await store._redis.ttl(key) > 0, f"{key!r} would stay for ever"
    await store.aclose()
