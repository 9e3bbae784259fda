"""`orca chaos`: seeded faults over a running system."""

import asyncio
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import orjson

from services.chaos.local import FLAGS, LocalSystem
from services.chaos.report import Report
from services.chaos.runner import Options, Prompts, Runner
from services.chaos.settings import ChaosSettings
from services.chaos.target import LocalTarget
from services.common.errors import ConfigurationError
from services.common.models.resolve import resolve_model
from services.common.settings import parse

POISON_TOKEN = 40_000  # of the built-in model's 49,152; in no prompt of ours


def say(text: str) -> None:
    """Progress: a line each, at once."""
    sys.stdout.write(f"orca chaos: {text}\n")
    sys.stdout.flush()


def check(settings: ChaosSettings) -> None:
    """Flags that do not go together. Raises ConfigurationError."""
    if settings.url and not settings.data_dir:
        raise ConfigurationError("--url needs --data-dir, the folder of that `orca up`")
    if settings.url and settings.up:
        raise ConfigurationError("--up is for a system of its own; with --url there is one already")


def data_dir(settings: ChaosSettings) -> Path:
    return Path(settings.data_dir).expanduser().resolve()


@asynccontextmanager
async def system(settings: ChaosSettings, report: Report) -> AsyncIterator[LocalTarget]:
    """The system to hurt: the one that was named, or a new one, which must drain well in the end."""
    if settings.url:
        yield LocalTarget(settings.url, data_dir(settings))
        return
    with tempfile.TemporaryDirectory(prefix="orca-chaos-", ignore_cleanup_errors=True) as temporary:
        folder = data_dir(settings) if settings.data_dir else Path(temporary)
        flags = [*(shlex.split(settings.up) or FLAGS), *(["--fake-salted"] if settings.salted else [])]
        own = LocalSystem(folder, flags, POISON_TOKEN if settings.poison else None)
        say(f"starting orca up {shlex.join(flags)}")
        await own.start()
        try:
            yield LocalTarget(own.url, folder)
        finally:
            code = await own.stop()
            if code:
                report.violations.append(f"orca up ended with {code}: {own.last_words()}")


async def run(settings: ChaosSettings) -> Report:
    """All runs, in order of their seeds. Raises ConfigurationError."""
    report = Report()
    # Ended like by Ctrl-C: nobody stays stopped, and no system of ours stays behind.
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    async with system(settings, report) as target:
        try:
            if settings.salted and not target.is_fake:
                raise ConfigurationError("--salted: the workers run a model, whose tokens cannot be told beforehand")
            if settings.poison and target.poison < 0:
                raise ConfigurationError("--poison: ORCA_FAKE_POISON_TOKEN was not set for that `orca up`")
            if target.failpoints is None:
                say("ORCA_FAILPOINTS was not set for that `orca up`: faults come in the middle only")
            prompts = Prompts(resolve_model(target.model_spec)) if settings.salted else None
            options = Options(settings.streams, settings.only, settings.salted, settings.mixes, settings.tokens)
            runner = Runner(target, options, await target.model(), prompts, say)
            await runner.prepare()
            for seed in range(settings.seed, settings.seed + settings.runs):
                report.runs.append(await runner.run(seed))
            if settings.poison:
                report.runs.append(await runner.poison(settings.seed))
        finally:
            target.continue_all()
            await target.aclose()
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca chaos`: 0 if every stream was right and nothing is left over, else 1."""
    try:
        settings = parse(ChaosSettings, sys.argv[1:] if argv is None else argv, "orca chaos")
        check(settings)
        report = asyncio.run(run(settings))
    except ConfigurationError as error:
        sys.stderr.write(f"orca chaos: {error.message}\n")
        return 2
    except httpx.HTTPError as error:
        sys.stderr.write(f"orca chaos: no answer from the system: {error}\n")
        return 2
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    sys.stdout.write(f"\n{report.table()}\n")
    if settings.json_file:
        runs = {"each": report.runs}
        Path(settings.json_file).write_bytes(orjson.dumps(report.to_json() | runs, option=orjson.OPT_INDENT_2))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
