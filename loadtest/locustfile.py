"""Load from many users at once, with every server-sent event timed. `make load` runs it for a minute, `make load-ui`
with locust's web page.

Each locust user is a Poisson process of RATE_PER_USER requests a second that waits for no answer, so that a slow server
is not asked less. Statistics, in locust's own tables and CSV: TTFT and ITL (an entry per event), TPOT and E2E (one per
request). At the end they are set beside the server's histograms.
"""

import http.client
import json
import logging
import random
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import gevent
from gevent.pool import Group
from locust import LoadTestShape, User, events, task
from locust.env import Environment

from loadtest.agreement import Histogram, compare, histograms
from loadtest.peers.traces import TRACES, Prompts, Request
from services.simulator.trace import read_jsonl

log = logging.getLogger(__name__)

RATE_PER_USER = 0.1
NUM_REQUESTS = 500  # then they begin anew
TIMEOUT_S = 300
BURST_EVERY_S, BURST_S, BURST_FACTOR = 20, 4, 4
SERVER_NAMES = {
    "TTFT": "orca_time_to_first_token_seconds",
    "ITL": "orca_inter_token_latency_seconds",
    "TPOT": "orca_time_per_output_token_seconds",
    "E2E": "orca_request_duration_seconds",
}


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="name of the model")
    parser.add_argument("--trace", default="orca", help=f"{', '.join(TRACES)}, or a file that --record wrote")
    parser.add_argument("--tenants", default="", help="names by comma; requests are of each in turn")
    parser.add_argument("--shape", default="steady", choices=["steady", "ramp", "burst"], help="rate over time")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, at the shape's height")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, prompts and arrivals")


def load_trace(name: str, seed: int) -> list[Request]:
    """Named, or of the lengths in a file."""
    if name in TRACES:
        return TRACES[name](NUM_REQUESTS, seed)
    prompts = Prompts(seed)
    return [Request(prompts.cut(a.prompt_tokens), a.output_tokens) for a in read_jsonl(Path(name))[:NUM_REQUESTS]]


class Shape(LoadTestShape):
    """Users, ten for each request a second. Runs as long as --run-time says, a minute if it says nothing."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options, at_s = self.runner.environment.parsed_options, self.get_run_time()
        length_s = options.run_time or 60
        if at_s > length_s:
            return None
        rate: float = options.rate
        if options.shape == "ramp":
            rate *= min(1.0, 0.1 + 0.9 * at_s / length_s)
        elif options.shape == "burst":
            rate *= 1.0 if at_s % BURST_EVERY_S < BURST_S else 1 / BURST_FACTOR
        return max(1, round(rate / RATE_PER_USER)), 1000


@dataclass(slots=True)
class Timing:
    """What one request showed, in seconds of the monotonic clock."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    events: int = 0
    tokens: int = 0


class Caller(User):
    """One Poisson process."""

    trace: Any = None  # endless; shared by all users
    tenants: Any = None
    rng = random.Random()

    def wait_time(self) -> float:
        return self.rng.expovariate(RATE_PER_USER)

    def on_start(self) -> None:
        self._open = Group()
        gevent.sleep(self.wait_time())  # or all would begin at once

    def on_stop(self) -> None:
        self._open.join(TIMEOUT_S)

    @task
    def arrive(self) -> None:
        request = next(Caller.trace)
        self._open.spawn(self._ask, request, next(Caller.tenants))

    def _ask(self, request: Request, tenant: str) -> None:
        timing = Timing(time.monotonic())
        error: Exception | None = None
        try:
            self._stream(request, tenant, timing)
        except (OSError, http.client.HTTPException, ValueError) as failure:
            error = failure
        if timing.tokens > 1:
            self._fire("TPOT", (timing.last - timing.first) / (timing.tokens - 1))
        self._fire("E2E", time.monotonic() - timing.sent, error, timing.tokens)

    def _fire(self, name: str, seconds: float, error: Exception | None = None, length: int = 0) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=name,
            response_time=1e3 * seconds,
            response_length=length,
            exception=error,
            context={},
        )

    def _stream(self, request: Request, tenant: str, timing: Timing) -> None:
        """Raises OSError, HTTPException or ValueError."""
        options, address = self.environment.parsed_options, urlsplit(self.host or "")
        body = {
            "model": options.model,
            "prompt": request.prompt,
            "max_tokens": request.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json"} | ({"X-Orca-Tenant": tenant} if tenant else {})
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}: {answer.read(200)!r}")
            self._read(answer, timing)
        finally:
            connection.close()

    def _read(self, answer: http.client.HTTPResponse, timing: Timing) -> None:
        while line := answer.readline():
            now = time.monotonic()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise ValueError(event["error"].get("code", "error"))
            if event.get("usage"):
                timing.tokens = event["usage"]["completion_tokens"]
            if not event.get("choices"):
                continue
            if timing.events:
                self._fire("ITL", now - timing.last)
            else:
                timing.first = now
                self._fire("TTFT", now - timing.sent)
            timing.events, timing.last = timing.events + 1, now
        if not timing.tokens:
            raise ValueError("the stream ended without its usage")


def _server(host: str) -> dict[str, Histogram]:
    with urlopen(f"{host}/metrics", timeout=10) as answer:
        return histograms(answer.read().decode())


_before: dict[str, Histogram] = {}


@events.test_start.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    Caller.rng = random.Random(options.seed)
    Caller.trace = cycle(load_trace(options.trace, options.seed))
    Caller.tenants = cycle(options.tenants.split(","))
    _before.update(_server(environment.host or ""))


@events.test_stop.add_listener
def _compare(environment: Environment, **_: Any) -> None:
    """Beside the server's own histograms; more than a bucket apart is a failure of the run."""
    after = _server(environment.host or "")
    apart = 0
    for name, server_name in SERVER_NAMES.items():
        entry = environment.stats.get(name, "SSE")
        if not entry.num_requests or server_name not in after:
            continue
        added = after[server_name].since(_before[server_name])
        for line in compare(name, lambda q, e=entry: e.get_response_time_percentile(q) / 1e3, added):  # type: ignore[misc]
            log.info("%s", line)
            apart = max(apart, line.apart)
    if apart > 1:
        log.error("client and server disagree by %d buckets", apart)
        environment.process_exit_code = 1
