"""Traces: what arrives when. Synthetic ones from a seed, recorded ones from JSONL."""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. arrival_s: seconds from the start. prompt: its token ids, or None where only the length matters;
    prefix: number of the shared prefix that it begins with, and how long that is. ttft_s: its own target, 0 is none."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    max_tokens: int | None = None
    prompt: tuple[int, ...] | None = None
    prefix: int | None = None
    prefix_tokens: int = 0
    ttft_s: float = 0.0


Lengths = Callable[[random.Random], tuple[int, int]]

# Quantiles 0, 5, .. 100 % of the 79,725 first turns with input + output < 2048 that the vLLM paper's artifact samples
# its ShareGPT trace from (SOSP'23, artifact sosp-ae-astra; means 161 and 338, as in the paper's Figure 11).
SHAREGPT_INPUT = (1, 7, 9, 11, 13, 15, 18, 21, 24, 29, 35, 44, 55, 71, 94, 133, 203, 324, 506, 863, 2028)
SHAREGPT_OUTPUT = (1, 22, 45, 75, 101, 128, 157, 188, 216, 244, 271, 300, 330, 364, 405, 458, 525, 619, 754, 899, 2009)
# Alpaca's means are the paper's 19.3 and 58.5; the spread (log-normal sigma) is not published. 0.8 is what the paper's
# saturated batch sizes imply for the output; the input's hardly matters.
ALPACA_MEANS, ALPACA_SIGMAS = (19.31, 58.45), (0.5, 0.8)
MODEL_LIMIT = 2048


def orca_lengths(rng: random.Random) -> tuple[int, int]:
    """Orca, OSDI'22, section 6.2: input U(32, 512), generated U(1, 128), all of them always generated."""
    return rng.randint(32, 512), rng.randint(1, 128)


def fixed_lengths(prompt: int, output: int) -> Lengths:
    return lambda rng: (prompt, output)


def _quantile(rng: random.Random, table: Sequence[int]) -> int:
    position = rng.random() * (len(table) - 1)
    index = int(position)
    low, high = math.log(table[index]), math.log(table[index + 1])
    return round(math.exp(low + (high - low) * (position - index)))


def sharegpt_lengths(rng: random.Random) -> tuple[int, int]:
    while True:
        prompt, output = _quantile(rng, SHAREGPT_INPUT), _quantile(rng, SHAREGPT_OUTPUT)
        if prompt + output < MODEL_LIMIT:
            return prompt, output


def _lognormal(rng: random.Random, mean: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def alpaca_lengths(rng: random.Random) -> tuple[int, int]:
    prompt, output = (
        _lognormal(rng, mean, sigma, MODEL_LIMIT // 2) for mean, sigma in zip(ALPACA_MEANS, ALPACA_SIGMAS, strict=True)
    )
    return prompt, output


def chat_lengths(rng: random.Random) -> tuple[int, int]:
    """Heavy-tailed: many short questions, some long documents. Medians 100 and 120, capped at 1024 and 512."""
    return _lognormal(rng, 165, 1.0, 1024), _lognormal(rng, 180, 0.9, 512)


def question_lengths(rng: random.Random) -> tuple[int, int]:
    """A short question behind a long shared prefix."""
    return SHARED_PREFIX_TOKENS + rng.randint(8, 48), rng.randint(16, 96)


SHARED_PREFIX_TOKENS = 512
NUM_PREFIXES = 8
LENGTHS: dict[str, Lengths] = {
    "orca": orca_lengths,
    "sharegpt": sharegpt_lengths,
    "alpaca": alpaca_lengths,
    "chat": chat_lengths,
    "shared-prefix": question_lengths,
}


def lengths_of(name: str) -> Lengths:
    """A named distribution, or INPUTxOUTPUT for equal lengths. Raises ConfigurationError."""
    if name in LENGTHS:
        return LENGTHS[name]
    prompt, _, output = name.partition("x")
    if prompt.isascii() and prompt.isdigit() and output.isascii() and output.isdigit() and int(prompt) and int(output):
        return fixed_lengths(int(prompt), int(output))
    raise ConfigurationError(f"--trace: no file and no synthetic trace {name!r}; there are {', '.join(LENGTHS)}, 32x32")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's share of the arrivals, its priority, and its own target for the first token (0 is the common one)."""

    name: str
    share: float
    priority: int = 0
    ttft_ms: float = 0.0


def tenants_of(text: str) -> list[Tenant]:
    """NAME=SHARE[:PRIORITY[:TTFT_MS]],... Raises ConfigurationError."""
    out = []
    for part in filter(None, text.split(",")):
        name, _, rest = part.partition("=")
        share, priority, ttft_ms, *more = (*rest.split(":"), "", "")
        try:
            tenant = Tenant(name.strip(), float(share), int(priority or 0), float(ttft_ms or 0))
        except ValueError:
            raise ConfigurationError(f"--tenants: {part!r} is not NAME=SHARE[:PRIORITY[:TTFT_MS]]") from None
        if any(more) or not tenant.name or not 0 < tenant.share < math.inf or not 0 <= tenant.ttft_ms < math.inf:
            raise ConfigurationError(f"--tenants: {part!r} needs a name and a share above 0")
        out.append(tenant)
    return out or [Tenant("", 1.0)]


def synthetic(
    name: str, rate: float, count: int, seed: int, burstiness: float = 1.0, tenants: Sequence[Tenant] = ()
) -> list[Arrival]:
    """`count` requests at `rate` per second. Gaps are gamma-distributed, `burstiness` is their coefficient of
    variation: 1 is Poisson, more is bursts. The same seed gives the same requests at every rate.

    Raises ConfigurationError."""
    lengths = lengths_of(name)
    rng = random.Random(seed)
    shape = 1.0 / burstiness**2
    tenants = tenants or [Tenant("", 1.0)]
    weights = [tenant.share for tenant in tenants]
    now, out = 0.0, []
    for _ in range(count):
        now += rng.gammavariate(shape, 1.0 / shape) / rate
        prompt, output = lengths(rng)
        tenant = rng.choices(tenants, weights)[0]
        arrival = Arrival(now, prompt, output, tenant.name, tenant.priority, ttft_s=tenant.ttft_ms / 1000)
        if name == "shared-prefix":
            arrival = replace(arrival, prefix=rng.randrange(NUM_PREFIXES), prefix_tokens=SHARED_PREFIX_TOKENS)
        out.append(arrival)
    return out


class TraceLine(BaseModel):
    """One line of a recorded trace."""

    model_config = ConfigDict(extra="ignore", strict=True)

    arrival: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    prompt: list[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = Field(None, min_length=1)
    output_tokens: Annotated[int, Field(ge=0, le=10_000_000)]
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    tenant: str = Field("", max_length=64)
    priority: int = Field(0, ge=-100, le=100)

    def arrival_of(self) -> Arrival:
        if self.prompt is None and self.prompt_tokens is None:
            raise ValueError("prompt_tokens: missing (or give prompt, a list of token ids)")
        tokens = len(self.prompt) if self.prompt is not None else self.prompt_tokens or 0
        prompt = tuple(self.prompt) if self.prompt is not None else None
        output = max(1, self.output_tokens)
        if self.max_tokens is not None and self.max_tokens < output:
            raise ValueError("max_tokens: less than output_tokens")
        return Arrival(self.arrival, tokens, output, self.tenant, self.priority, self.max_tokens, prompt)


def read_jsonl(path: Path) -> list[Arrival]:
    """A recorded trace, in order of arrival. Raises ConfigurationError naming the line and what is wrong with it."""
    out = []
    try:
        for number, line in _lines(path):
            try:
                out.append(TraceLine.model_validate(json.loads(line)).arrival_of())
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(str(part) for part in first["loc"]) or "line"
                raise ConfigurationError(f"{path} line {number}: {where}: {first['msg'].lower()}") from None
            except ValueError as error:
                reason = "no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
                raise ConfigurationError(f"{path} line {number}: {reason}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {getattr(error, 'strerror', None) or 'no text file'}") from None
    if not out:
        raise ConfigurationError(f"{path}: no requests in it")
    start = min(arrival.arrival_s for arrival in out)
    out = [replace(arrival, arrival_s=arrival.arrival_s - start) for arrival in out]
    return sorted(out, key=lambda arrival: arrival.arrival_s)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests in the same order, at another mean rate."""
    span = arrivals[-1].arrival_s - arrivals[0].arrival_s
    factor = (len(arrivals) - 1) / span / rate if span > 0 else 0.0
    start = arrivals[0].arrival_s
    return [replace(arrival, arrival_s=(arrival.arrival_s - start) * factor) for arrival in arrivals]


def rate_of(arrivals: Sequence[Arrival]) -> float:
    """Mean requests per second; 0 if all come at once."""
    span = arrivals[-1].arrival_s - arrivals[0].arrival_s
    return (len(arrivals) - 1) / span if span > 0 else 0.0
