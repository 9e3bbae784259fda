"""What a kubelet asks of a process: has it started, is it well, does it take work. Answered on the thread that serves
/metrics, so that a stuck event loop is seen from outside it."""

import asyncio
import time

TURN_S = 1.0
# A process whose event loop has not turned for so long will not recover by itself.
STUCK_S = 30.0


class Health:
    """started: all that takes long at the start is done. reachable: Redis answered last time. draining: it takes
    nothing new."""

    def __init__(self) -> None:
        self.started = self.reachable = self.draining = False
        self._turned = time.monotonic()

    async def run(self) -> None:
        """Note that the event loop turns. Ends by cancellation."""
        while True:
            self._turned = time.monotonic()
            await asyncio.sleep(TURN_S)

    def answer(self, path: str) -> tuple[int, str] | None:
        """HTTP status and why; None if that path asks nothing."""
        reasons = {"/health/started": self._not_started, "/health/ready": self._not_ready, "/health/live": self._stuck}
        if path not in reasons:
            return None
        reason = reasons[path]()
        return (503, reason) if reason else (200, "ok")

    def _not_started(self) -> str:
        return "" if self.started else "starting"

    def _not_ready(self) -> str:
        if self.draining:
            return "draining"
        return self._not_started() or ("" if self.reachable else "Redis does not answer")

    def _stuck(self) -> str:
        silent = time.monotonic() - self._turned
        return f"the event loop has not turned for {silent:.0f} s" if silent > STUCK_S else ""
