"""The command line: one clear line and exit code 2 when something is wrong; a drain that loses nothing."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from loadtest.up import Up
from services.cli.ports import free_port
from tests.e2e.conftest import MODEL


def orca(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("fly",), "no command"),
    (("up", "--workers", "many"), "--workers"),
    (("up", "--workers", "0"), "--workers"),
    (("up", "--nonsense", "1"), "nonsense"),
    (("up", "--policy", "best"), "--policy"),
    (("up", "--model", "/nonexistent"), "no model at"),
    (("up", "--model", ""), "no model at"),
    (("up", "--model", "builtin:none"), "no built-in model"),
    (("up", "--redis-url", "http://foo"), "--redis-url"),
    (("up", "--redis-url", "redis://127.0.0.1:1/0"), "no answer"),
    (("up", "--host", "256.1.1.1", "--allow-anonymous"), "cannot listen"),
    (("up", "--host", "0.0.0.0"), "anybody could use this server"),
    (("up", "--api-keys", "/nonexistent"), "--api-keys /nonexistent: No such file"),
    (("scheduler", "--leadership", "kubernetes"), "no Kubernetes API"),
    (("worker", "--otlp-endpoint", "collector:4317"), "--otlp-endpoint"),
    (("key", "a b"), "--tenant"),
    (("up", "--data-dir", "/dev/null/x"), "--data-dir"),
    (("up", "--executor", "torch", "--kv-blocks", "9999999"), "no memory"),
    (("worker", "--redis-url", "nope"), "--redis-url"),
]


@pytest.mark.parametrize(("arguments", "why"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    if arguments[0] == "up":
        arguments = ("up", "--port", str(free_port()), "--data-dir", str(tmp_path), *arguments[1:])
    done = orca(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_port_taken_and_environment(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = orca("up", "--data-dir", str(tmp_path), ORCA_PORT=str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "is taken" in done.stderr


@pytest.mark.parametrize("command", ["", "up", "router", "scheduler", "worker"])
def test_help(command: str) -> None:
    done = orca(*command.split(), "--help")
    assert done.returncode == 0
    assert "orca" in done.stdout


async def test_two_ups_on_one_data_dir_and_drain_with_an_open_stream(tmp_path: Path) -> None:
    with Up(tmp_path, "--executor", "fake", "--fake-step-ms", "20") as up:
        second = await asyncio.to_thread(orca, "up", "--port", str(free_port()), "--data-dir", str(tmp_path))
        assert second.returncode == 2
        assert "another `orca up` uses" in second.stderr
        body = {"model": MODEL, "prompt": "a", "max_tokens": 100, "ignore_eos": True}
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with (
            httpx.AsyncClient(timeout=30) as http,
            http.stream("POST", f"{up.url}/v1/completions", json=streamed) as response,
        ):
            lines = response.aiter_lines()
            seen = [await anext(lines)]
            up.interrupt()
            async for line in lines:
                seen.append(line)
                if len(seen) == 60:
                    refused = await http.post(f"{up.url}/v1/completions", json=body)
                    assert refused.status_code == 503
        assert seen[-2] == "data: [DONE]"
        assert any('"completion_tokens":100' in line for line in seen), "nothing was lost"
