"""Where things are kept that can be made or fetched again: the built-in model, compiled kernels."""

import os
from pathlib import Path

# A folder that an image was shipped with, read-only: looked into first.
SHIPPED = "ORCA_SHIPPED_CACHE"


def cache_dir() -> Path:
    """The user's cache folder for Orca."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orca"


def cached(name: str) -> Path:
    """The path of a file in the cache: the one that was shipped, or the one to look for and to make."""
    shipped = Path(os.environ.get(SHIPPED) or "/nonexistent") / name
    return shipped if shipped.exists() else cache_dir() / name
