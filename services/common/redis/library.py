"""The text of the function library: one Redis library, in parts by what they are about."""

from importlib.resources import files


def source() -> str:
    """All parts, in the order of their names."""
    folder = files("services.common.redis").joinpath("functions")
    parts = sorted((part for part in folder.iterdir() if part.name.endswith(".lua")), key=lambda part: part.name)
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)
