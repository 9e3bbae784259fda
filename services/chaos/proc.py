"""What /proc says about a process. Linux only, like `orca up`'s own care for its children."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TCP_STATES = {"01": "established", "04": "fin-wait-1", "05": "fin-wait-2", "07": "close", "08": "close-wait"}


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds. to_redis: connections to Redis, which are pooled: they stay, up to a limit of their own."""

    files: int
    threads: int
    to_redis: int


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty if it is gone."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def state(pid: int) -> str:
    """R, S, T (stopped), Z ..., or nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _inodes_of_port(port: int) -> set[str]:
    """Sockets of this machine with that port on either side."""
    suffix = f":{port:04X}"
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[1].endswith(suffix) or fields[2].endswith(suffix):
                found.add(fields[9])
    return found


def held(pid: int, redis_port: int) -> Held | None:
    """None if the process is gone."""
    redis = _inodes_of_port(redis_port)
    links = []
    try:
        threads = len(os.listdir(f"/proc/{pid}/task"))
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(entry.path))
            except FileNotFoundError:
                continue  # closed while we looked
    except OSError:
        return None
    to_redis = sum(link.startswith("socket:[") and link[8:-1] in redis for link in links)
    return Held(len(links) - to_redis, threads, to_redis)


def open_files(pid: int) -> str:
    """What the open files are, by kind, the most first: sockets by their state and the ports of both ends."""
    sockets = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ports = [int(end.rsplit(":", 1)[1], 16) for end in fields[1:3]]
        sockets[f"socket:[{fields[9]}]"] = f"tcp {TCP_STATES.get(fields[3], fields[3])} {ports[0]}-{ports[1]}"
    kinds: Counter[str] = Counter()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            link = os.readlink(entry.path)
            kinds[sockets.get(link, link.split(":")[0])] += 1
    except OSError:
        return "gone"
    return ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(12))
