"""Fixtures of the protocol's check."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The services log each lost call; formatting that would take longer than the check."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
