"""What the APIs share that are read as the chat request which asks for the same."""

from typing import Any


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
