"""The file of API keys, read again when it changes."""

import asyncio
import logging
from pathlib import Path

from services.common.errors import ConfigurationError
from services.router.core.tenants import KeyRing, is_loopback

log = logging.getLogger(__name__)

RELOAD_S = 1.0


class KeyFile:
    """What it holds now. A change that makes it unreadable is told, and the keys known before stay."""

    def __init__(self, path: str) -> None:
        """Raises ConfigurationError."""
        self._path = Path(path).expanduser()
        self._text = ""
        self.ring = self._read()

    def _read(self) -> KeyRing:
        try:
            self._text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationError(f"--api-keys {self._path}: {reason}") from None
        try:
            return KeyRing.parse(self._text)
        except ConfigurationError as error:
            raise ConfigurationError(f"--api-keys {self._path}: {error.message}") from None

    async def watch(self) -> None:
        """Ends by cancellation. The text is compared, not its time: a Secret's files are links that are swapped."""
        while True:
            await asyncio.sleep(RELOAD_S)
            before = self._text
            try:
                ring = await asyncio.to_thread(self._read)
            except ConfigurationError as error:
                if self._text != before:
                    log.error("%s; the keys known before stay", error.message)
                continue
            if self._text != before:
                self.ring = ring
                log.info("%d API keys are known", len(ring))


def key_file(path: str, allow_anonymous: bool, host: str) -> KeyFile | None:
    """Raises ConfigurationError if it cannot be read, or if there is none and others than this machine could ask."""
    if path:
        return KeyFile(path)
    if host != "localhost" and not is_loopback(host) and not allow_anonymous:
        raise ConfigurationError(f"--host {host}: anybody could use this server; give --api-keys or --allow-anonymous")
    return None
