"""`make bench-scheduler`: our scheduler core and vLLM's, in turn, several rounds, in one run on one machine."""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from loadtest.scheduler.ours import CASES

SHARED_CASES = ("steady", "waiting", "mixed")
PEER = Path(__file__).with_name("vllm_peer.py")


def measure(command: list[str]) -> dict[str, Any]:
    """One process, one case. A failure is shown and ends the run."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def median(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--vllm-python", default="", help="the peer's interpreter; empty leaves it out")
    parser.add_argument("--json", default="", help="write all figures to this file")
    arguments = parser.parse_args()
    ours: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    theirs: dict[str, list[dict[str, Any]]] = {case: [] for case in SHARED_CASES}
    for _ in range(arguments.rounds):
        for case in CASES:
            options = ["--case", case, "--steps", str(arguments.steps)]
            ours[case].append(measure([sys.executable, "-m", "loadtest.scheduler.ours", *options]))
            if case in theirs and arguments.vllm_python:
                theirs[case].append(measure([arguments.vllm_python, str(PEER), *options]))
    print(f"schedule + apply, median of {arguments.rounds} rounds of {arguments.steps} steps")
    print(
        f"{'case':<12}{'schedule ms':>12}{'apply ms':>10}{'sum ms':>9}{'us/seq-step':>13}"
        f"{'vLLM sum ms':>13}{'ratio':>7}"
    )
    for case, found in ours.items():
        one = median(found)
        line = f"{case:<12}{one['schedule_ms']:>12.3f}{one['apply_ms']:>10.3f}{one['sum_ms']:>9.3f}"
        line += f"{one['us_per_sequence_step']:>13.2f}"
        if theirs.get(case):
            peer = median(theirs[case])
            line += f"{peer['sum_ms']:>13.3f}{peer['sum_ms'] / one['sum_ms']:>7.1f}"
        print(line)
        if theirs.get(case) and "with_add_ms" in one:
            ratio = peer["with_add_ms"] / one["with_add_ms"]
            print(f"  with add: ours {one['with_add_ms']:.3f}, vLLM {peer['with_add_ms']:.3f} ms, ratio {ratio:.1f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"ours": ours, "vllm": theirs}, indent=1))


if __name__ == "__main__":
    main()
