"""Damaged requests over raw sockets: every answer is well-formed and no server error, nothing hangs, nothing grows.

ORCA_FUZZ_CASES=50000 makes it a long test, ORCA_FUZZ_SEED another one, and ORCA_FUZZ_ONLY=17 sends case 17 alone.
"""

import asyncio
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loadtest.up import Up
from tests.e2e.conftest import eventually
from tests.fuzz.conftest import cases, run_seed
from tests.fuzz.corpus import Seed, seeds
from tests.fuzz.mutators import MUTATORS, mutated
from tests.fuzz.wire import Heard, exchange, understood

CASES = cases(1500)
CONCURRENCY = 24
WARM_UP = 500
# Growth of the router that is no leak: its caches and its allocator's arenas; and connections to Redis, of which it
# keeps one for each request that it ever had at once.
SLACK_MB, SLACK_FILES = 40.0, CONCURRENCY


@dataclass
class Run:
    """What came of many cases."""

    statuses: Counter[str] = field(default_factory=Counter)
    by_mutator: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, index: int, name: str, data: bytes, heard: Heard) -> None:
        outcome = " ".join(map(str, heard.statuses[:1])) or "closed"
        self.statuses[outcome] += 1
        self.by_mutator[name.partition(" of ")[0], outcome] += 1
        self.faults += [f"case {index}, {name}: {fault}\n  {data[:600]!r}" for fault in heard.faults]

    def table(self) -> str:
        outcomes = sorted(self.statuses)
        rows = [f"{'':14}" + "".join(f"{outcome:>8}" for outcome in outcomes)]
        rows += [f"{n:14}" + "".join(f"{self.by_mutator[n, o] or '':>8}" for o in outcomes) for n in MUTATORS]
        return "\n".join([*rows, f"{'all':14}" + "".join(f"{self.statuses[o]:>8}" for o in outcomes)])


def allowed(fault: str, data: bytes) -> bool:
    """A request that gave itself a deadline may be told that it is over."""
    return fault == "status 504" and b"x-orca-timeout" in data.lower()


async def attack(up: Up, indices: range, run: Run) -> None:
    """Send these cases, some at once."""
    all_seeds, numbers = seeds(), iter(indices)

    async def sender() -> None:
        for index in numbers:
            name, data = mutated(run_seed(), index, all_seeds)
            heard = await exchange(up.port, data, random.Random(index))
            heard.faults = [fault for fault in heard.faults if not allowed(fault, data)]
            run.note(index, name, data, heard)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(sender())


def router(up: Up) -> Path:
    return Path(f"/proc/{up.pid('router-0')}")


def memory_mb(up: Up) -> float:
    return int((router(up) / "status").read_text().split("VmRSS:")[1].split()[0]) / 1024


def open_files(up: Up) -> int:
    return len(list((router(up) / "fd").iterdir()))


def connections(up: Up) -> int:
    """Of clients to the router, that it has not let go of."""
    rows = [line.split() for line in (router(up) / "net" / "tcp").read_text().splitlines()[1:]]
    held = {"01": "established", "08": "close wait"}
    return sum(int(row[1].partition(":")[2], 16) == up.port and row[3] in held for row in rows)


async def test_damaged_requests_do_no_damage(unharmed: Up, capsys: pytest.CaptureFixture[str]) -> None:
    run, pid = Run(), unharmed.pid("router-0")
    await attack(unharmed, range(min(WARM_UP, CASES // 2)), run)
    await eventually(unharmed.is_idle, within_s=30)
    memory, files = memory_mb(unharmed), open_files(unharmed)
    await attack(unharmed, range(min(WARM_UP, CASES // 2), CASES), run)
    with capsys.disabled():
        print(f"\n{CASES} damaged requests (seed {run_seed()}), by mutator and first answer:\n{run.table()}")
        print(f"router: {memory:.0f} MB, then {memory_mb(unharmed):.0f} MB; {files} files, then {open_files(unharmed)}")
    assert not run.faults, f"{len(run.faults)} faults\n" + "\n".join(run.faults[:20])
    assert sum(run.statuses.values()) == CASES
    assert run.statuses["200"] > CASES // 50, "some were still good"
    assert run.statuses["400"] > CASES // 10
    await eventually(lambda: connections(unharmed) == 0)
    assert open_files(unharmed) <= files + SLACK_FILES
    assert memory_mb(unharmed) < memory + SLACK_MB
    assert unharmed.pid("router-0") == pid, "it never died"
    assert "Traceback" not in unharmed.logs()


async def test_one_case_again(unharmed: Up, capsys: pytest.CaptureFixture[str]) -> None:
    """ORCA_FUZZ_ONLY names a case to repeat."""
    index = int(os.environ.get("ORCA_FUZZ_ONLY", "0"))
    name, data = mutated(run_seed(), index, seeds())
    heard = await exchange(unharmed.port, data, random.Random(index))
    with capsys.disabled():
        print(f"\n{name}: {understood(data)}\n{data[:5000]!r}\n{heard}")
    assert not heard.faults


@pytest.mark.parametrize("seed", seeds(), ids=lambda seed: seed.name.replace(" ", "-"))
async def test_undamaged_they_are_good(unharmed: Up, seed: Seed) -> None:
    """The corpus is of valid requests: where a route is served, this is what it takes."""
    heard = await exchange(unharmed.port, seed.raw(), None)
    assert not heard.faults
    assert heard.statuses in [[status] for status in seed.statuses]


def test_a_case_can_be_repeated() -> None:
    assert [mutated(5, index, seeds()) for index in range(200)] == [mutated(5, index, seeds()) for index in range(200)]
    assert {mutated(5, index, seeds())[0].partition(" of ")[0] for index in range(1000)} == set(MUTATORS)


def test_the_judge_knows_good_from_bad() -> None:
    """What the checks rest on: what is complete, what is broken, what is only a part."""
    get = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    assert (understood(get).methods, understood(get).rest) == (["GET"], "")
    assert (understood(get * 3).methods, understood(get * 3).rest) == (["GET"] * 3, "")
    assert (understood(get + get[:9]).methods, understood(get + get[:9]).rest) == (["GET"], "open")
    assert understood(b"\x16\x03\x01\x02\r\n\r\n").rest == "broken"
    assert understood(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabc").rest == "open"
