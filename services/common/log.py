"""Logging: one line an event, to standard error."""

import logging


def configure(process: str, level: str) -> None:
    """Set up the root logger of a process. The process's name starts each line."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s {process} %(levelname)s %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
