"""The `orca` command: one subcommand per process, and `up` for all of them on one machine."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "chaos": ("services.chaos.main", "seeded faults over a running system, with every stream checked"),
    "drain": ("services.cli.operate", "empty a worker: its sequences go on elsewhere; --undo lets it work again"),
    "key": ("services.cli.key", "a new API key, and the entry for the file of --api-keys"),
    "move": ("services.cli.operate", "move a request to another worker"),
    "up": ("services.cli.up", "a whole system on this machine: Valkey, scheduler, workers, router"),
    "router": ("services.router.main", "one router: the HTTP front"),
    "scheduler": ("services.scheduler.main", "one scheduler: decides every iteration"),
    "simulate": ("services.simulator.main", "the scheduler on a virtual clock: capacity, policies, papers"),
    "worker": ("services.worker.main", "one worker: a model replica"),
}


def usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: orca COMMAND [--help] [options]\n\n" + "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch; each command reads its own flags. Exit code 2 and one line on a wrong command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"orca: no command {command!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[command][0])
        result: int = getattr(module, command if command in ("drain", "move") else "main")(rest)
    except KeyboardInterrupt:
        return 130
    return result


if __name__ == "__main__":
    sys.exit(main())
