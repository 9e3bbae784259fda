"""Points of the protocol at which a chaos run may hurt this very process. Off, they cost one comparison.

ORCA_FAILPOINTS names a folder. A file there, called as a point, arms it: "<process name or its beginning> <kill, stop
or hang> <how many passes to let go>". Whoever hits it renames the file first, so that each is hit once and can be
counted. A hang holds the thread that passes, for a minute.
"""

import os
import signal
import time
from pathlib import Path

FOLDER = os.environ.get("ORCA_FAILPOINTS", "")
NAME = os.environ.get("ORCA_NAME", "")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
HANG_S = 60.0

_passes: dict[tuple[str, int], int] = {}


def failpoint(point: str) -> None:
    """Pass a point of the protocol, unless it is armed for this process."""
    if not FOLDER:
        return
    path = Path(FOLDER) / point
    try:
        armed = path.stat().st_mtime_ns
        process, action, skip = path.read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if not NAME.startswith(process):
        return
    passes = _passes.get((point, armed), 0)
    _passes[point, armed] = passes + 1
    if passes < int(skip):
        return
    try:
        path.rename(path.with_name(f"{point}.hit-{os.getpid()}"))
    except FileNotFoundError:
        return  # another process was first
    if action == "hang":
        time.sleep(HANG_S)
    else:
        os.kill(os.getpid(), SIGNALS[action])
