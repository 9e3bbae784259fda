"""Builds and tries grammars in a process of its own: what a grammar does to it, it does to nobody else.

Lines of JSON on standard input: first the tokenizer, then {"kind", "value"}; to each of these one line on standard
output, {"grammar"} or {"error"}. One that takes too much processor time or stack ends the process.
"""

import json
import signal
import sys
import threading
from typing import Any

from services.common.text.grammar import Grammars

# What a compile and the first masks may take. The worker, which does the same, makes a step wait for it.
CPU_S = 0.75
# A quarter of what a worker's thread has.
STACK_BYTES = 2 << 20


def answer(grammars: Grammars, asked: dict[str, Any]) -> dict[str, str]:
    try:
        return {"grammar": grammars.build(asked["kind"], asked["value"])}
    except (ValueError, RecursionError) as error:
        return {"error": str(error)}


def on_small_stack(grammars: Grammars, asked: dict[str, Any]) -> dict[str, str]:
    found: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: found.append(answer(grammars, asked)))
    thread.start()
    thread.join()
    return found[0] if found else {"error": "it cannot be read"}


def main() -> None:
    threading.stack_size(STACK_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router says when it is over, by closing the pipe
    first = json.loads(sys.stdin.readline())
    grammars = Grammars(first["tokenizer_json"], first["vocab_size"], first["eos_token_ids"])
    grammars.build("regex", "a")  # makes the tokenizer
    print("{}", flush=True)  # noqa: T201
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        said = on_small_stack(grammars, json.loads(line))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(json.dumps(said), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
