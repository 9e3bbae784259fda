"""A client whose stream survives anything: `python docs/resume.py URL MODEL PROMPT`. Needs httpx."""

import json
import sys
import time
import uuid
from collections.abc import Iterator

import httpx


def stream(url: str, body: dict[str, object]) -> Iterator[dict[str, object]]:
    """Every event once, over as many connections as it takes."""
    last, headers = "", {"Idempotency-Key": uuid.uuid4().hex}  # the same for every try: it runs once
    while True:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
                if response.status_code == 204:
                    return  # everything had come before the connection broke
                if response.status_code not in (429, 503):
                    response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith("id: "):
                        last = line.removeprefix("id: ")
                    elif line == "data: [DONE]":
                        return
                    elif line.startswith("data: ") and "stream_interrupted" not in line:
                        yield json.loads(line.removeprefix("data: "))
                        headers["Last-Event-ID"] = last  # only now: what was not read to its end comes again
        except httpx.TransportError:
            pass
        time.sleep(0.1)


if __name__ == "__main__":
    base, model, prompt = sys.argv[1:]
    for event in stream(base, {"model": model, "prompt": prompt, "max_tokens": 200, "stream": True}):
        print(event["choices"][0]["text"], end="", flush=True)  # type: ignore[index]
