"""Clients that pin other versions than ours: `outside.py`, run in `build/clients` (`make test-clients`)."""

import asyncio
import os
from pathlib import Path

import pytest

from loadtest.up import Up
from tests.e2e.conftest import eventually

PYTHON = Path("build/clients/bin/python")
SCRIPT = Path(__file__).with_name("outside.py")


async def test_litellm_and_langchain(clients_up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    """LITELLM_LOCAL_MODEL_COST_MAP: litellm would fetch its prices from the network."""
    assert os.access(PYTHON, os.X_OK), "`make test-clients` makes it"
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    child = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(SCRIPT), clients_up.url),
        env={**os.environ, **quiet},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(600):
        output, _ = await child.communicate()
    with capsys.disabled():
        print("\n" + output.decode())
    assert child.returncode == 0
    await eventually(clients_up.is_idle)
