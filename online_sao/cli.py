"""The `online-sao` command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, cast

import typer
from rich.console import Console
from rich.markup import escape

import online_sao
from online_sao import wiring
from online_sao.config import ENV_ADMIN_KEY, PresetName, Settings, load_settings, to_toml
from online_sao.datafolder import DataFolder
from online_sao.errors import OnlineSaoError
from online_sao.interfaces import Store
from online_sao.ports import url_of

app = typer.Typer(
    help="A chat service whose model keeps learning from its own judged replies.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True)
policies_app = typer.Typer(help="Look at the policy's versions.", no_args_is_help=True)
learner_app = typer.Typer(help="Steer the learner of a running service.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(policies_app, name="policies")
app.add_typer(learner_app, name="learner")

T = TypeVar("T")
err = Console(stderr=True)
out = Console()

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="Settings file (TOML).", dir_okay=False)
]
PresetOption = Annotated[
    str | None,
    typer.Option("--preset", help="`paper`, `online` (default) or `interactive`."),
]
DataOption = Annotated[
    Path | None, typer.Option("--data", "-d", help="Data folder.", file_okay=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.callback(invoke_without_command=True)
def version_callback(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Options of the command itself."""
    if version:
        out.print(online_sao.__version__)
        raise typer.Exit


@app.command()
def up(
    config: ConfigOption = None,
    preset: PresetOption = None,
    data: DataOption = None,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; 0 picks one.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="embedded, scripted (no model), vllm, or the URL of a running server."),
    ] = None,
) -> None:
    """Start the whole service on one machine: HTTP, engine, judging, learner.

    The admin key comes from ONLINE_SAO_ADMIN_KEY, else one is made, kept in the data folder and
    printed once. Stops cleanly on SIGTERM or Ctrl-C.
    """
    from online_sao import service

    settings = _settings(
        config, preset, data, service={"host": host, "port": port}, engine={"kind": engine}
    )
    _check_engine(settings.engine.kind)
    _log_to_stderr()
    admin_key = os.environ.get(ENV_ADMIN_KEY) or None

    def say(text: str) -> None:
        err.print(text, soft_wrap=True, highlight=False, markup=False)

    _run_until_signal(lambda stop: service.up(settings, admin_key, stop, say))


@app.command(hidden=True)
def learn(config: ConfigOption = None) -> None:
    """Run the learner's process (started by `up`), or one of several under torchrun."""
    settings = _settings(config, None, None)
    _log_to_stderr()
    ranks = _guard(wiring.join_ranks)
    if ranks is not None and not ranks.first:
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 stops, and dismisses us
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_when_orphaned, args=(os.getppid(),), daemon=True).start()
        _guard(lambda: wiring.follow(settings, ranks))
        return
    parent = os.getppid()

    async def work(stop: asyncio.Event) -> None:
        store = wiring.make_store(settings)
        await store.open()
        try:
            trainer = await asyncio.to_thread(make_trainer)
            orphaned = asyncio.create_task(_stop_when_orphaned(parent, stop))
            await wiring.make_learner(settings, store, trainer).run(stop)
            orphaned.cancel()
            if ranks is not None:
                trainer.dismiss()
        finally:
            await store.aclose()

    def make_trainer() -> Any:
        if ranks is None:
            return wiring.make_trainer(settings)
        return wiring.make_crew(settings, ranks)

    _run_until_signal(work)


@app.command()
def chat(
    data: DataOption = None,
    config: ConfigOption = None,
    url: Annotated[str | None, typer.Option(help="Service; default: the data folder's.")] = None,
) -> None:
    """Chat in the terminal and rate each reply with + or -."""
    from online_sao import terminal

    running = _running_settings(config, data).service
    folder = DataFolder(running.data)
    key = os.environ.get(ENV_ADMIN_KEY) or folder.read_key()
    if key is None:
        _fail(f"there is no key in {folder.key_file}: start the service first, or set "
              f"{ENV_ADMIN_KEY}")  # fmt: skip
    _guard(lambda: terminal.chat(url or url_of(running.host, running.port), key))


@app.command()
def status(
    data: DataOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    once: Annotated[bool, typer.Option("--once", help="Print once; else live.")] = False,
) -> None:
    """Show version, learner, reward and ledger of a data folder, live."""
    from online_sao import terminal

    def read(store: Store) -> Awaitable[dict[str, Any]]:
        return terminal.read_status(store)

    if as_json:
        out.print_json(json.dumps(_with_store(config, data, read)))
    elif once or not out.is_terminal:
        out.print(terminal.status_view(_with_store(config, data, read)))
    else:
        _with_store(config, data, lambda store: terminal.watch_status(store, out))


@app.command()
def ledger(
    data: DataOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Count every request by where it stands; exit code 1 if the ledger does not add up."""
    from online_sao import terminal

    book = _with_store(config, data, lambda store: store.ledger())
    if as_json:
        out.print_json(json.dumps(terminal.ledger_json(book)))
    else:
        out.print(terminal.ledger_view(book))
    if not book.adds_up:
        raise typer.Exit(1)


@app.command()
def doctor(
    config: ConfigOption = None,
    preset: PresetOption = None,
    data: DataOption = None,
    replies: Annotated[int, typer.Option(min=4, help="Replies to compare on.")] = 96,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and measure the engine against the learner on the served weights.

    Exit code 0 if everything is well: clip ratio under 0.1 % and mean |log r| under 0.05 (bf16)
    or 0.001 (fp32).
    """
    from online_sao import doctor as checks

    settings = _settings(config, preset, data)
    well = _guard(lambda: checks.run(settings, replies, as_json=as_json, console=out))
    raise typer.Exit(0 if well else 1)


@app.command()
def ablate(
    folder: Annotated[
        Path, typer.Option("--out", help="Folder of runs and report; goes on there.")
    ] = Path("ablation"),
    quick: Annotated[bool, typer.Option("--quick", help="Five arms, minutes.")] = False,
    task: Annotated[str, typer.Option(help="tools, single, or both.")] = "both",
    arms: Annotated[str, typer.Option(help="all, or names with commas between.")] = "all",
    lag: Annotated[int, typer.Option(min=0, help="Versions that rollouts lag behind.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every arm.")] = 3,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Policy updates of a run (60; quick: 40).")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Runs at once; 0: one a core.")] = 0,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Of what is finished; run nothing.")
    ] = False,
) -> None:
    """Compare SAO with its ablations and with other methods, on tiny tasks, with a chosen lag.

    Two tasks: arithmetic with a calculator (several turns) and sorting digits (one). Every run
    trains a small policy with the service's own trainer; runs go on where they were stopped.
    Writes report.md, CSV files and figures. Exit code 1 if a run failed.
    """
    from online_sao.ablation import command

    request = command.Request(
        task=task, arms=arms, lag=lag, seeds=seeds, updates=updates, quick=quick, out=folder,
        jobs=jobs or wiring.cores(), report_only=report_only,
    )  # fmt: skip
    try:
        well = _guard(lambda: command.ablate(request, out))
    except KeyboardInterrupt:
        _fail(f"stopped; the same command goes on with what is in {folder}")
    raise typer.Exit(0 if well else 1)


@config_app.command("show")
def config_show(
    config: ConfigOption = None, preset: PresetOption = None, data: DataOption = None
) -> None:
    """Print every setting as it is resolved, with what it does and where its default comes from."""
    print(to_toml(_settings(config, preset, data), comments=True), end="")  # noqa: T201 - TOML


@policies_app.command("list")
def policies_list(
    data: DataOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """List the policy's versions, newest first."""
    from online_sao import terminal

    versions = _with_store(config, data, lambda store: store.list_versions())
    if as_json:
        out.print_json(json.dumps([terminal.version_json(v) for v in versions]))
    else:
        out.print(terminal.versions_view(versions))


@learner_app.command("pause")
def learner_pause(data: DataOption = None, config: ConfigOption = None) -> None:
    """Record and judge, but do not learn, until `resume`."""
    _set_paused(config, data, True)


@learner_app.command("resume")
def learner_resume(data: DataOption = None, config: ConfigOption = None) -> None:
    """Learn again, from what was judged in the meantime too."""
    _set_paused(config, data, False)


def main() -> None:
    """Entry point."""
    app()


# -- what the commands share ---------------------------------------------------------------------


def _settings(
    config: Path | None, preset: str | None, data: Path | None, **sections: dict[str, Any]
) -> Settings:
    overrides = {
        name: {key: value for key, value in section.items() if value is not None}
        for name, section in sections.items()
    }
    if data is not None:
        overrides.setdefault("service", {})["data"] = data
    return _guard(
        lambda: load_settings(config, overrides, preset=cast("PresetName | None", preset))
    )


def _running_settings(config: Path | None, data: Path | None) -> Settings:
    """What the service on this data folder was started with, else the settings as they are."""
    settings = _settings(config, None, data)
    folder = DataFolder(settings.service.data)
    if config is None and folder.running_settings.exists():
        # The folder may have been moved or copied since: it is this one that is asked about.
        here: dict[str, dict[str, Any]] = {"service": {"data": folder.root}}
        return _guard(lambda: load_settings(folder.running_settings, here, environ={}))
    return settings


def _with_store(config: Path | None, data: Path | None, use: Callable[[Store], Awaitable[T]]) -> T:
    settings = _running_settings(config, data)
    folder = DataFolder(settings.service.data)
    if not settings.store.url and not folder.exists():
        _fail(f"{folder.root} is no data folder: start the service first, or name it with --data")

    async def work() -> T:
        store = wiring.make_store(settings)
        await store.open()
        try:
            return await use(store)
        finally:
            await store.aclose()

    return _guard(lambda: asyncio.run(work()))


def _set_paused(config: Path | None, data: Path | None, paused: bool) -> None:
    _with_store(config, data, lambda store: store.put_note("learner", {"paused": paused}))
    out.print("The learner is paused: replies are recorded and judged, nothing is learned."
              if paused else "The learner learns.")  # fmt: skip


def _check_engine(kind: str) -> None:
    if kind == "vllm":
        _fail("this version does not start vLLM itself: start a server and pass its URL, as in "
              "--engine http://127.0.0.1:8001")  # fmt: skip
    if kind not in ("embedded", "scripted") and not kind.startswith(("http://", "https://")):
        _fail(f"unknown engine {kind!r}: embedded, scripted, vllm, or an http URL")


def _run_until_signal(work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `work`; SIGTERM and Ctrl-C set its stop event. One clear line for our own errors."""

    async def main_task() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await work(stop)

    _guard(lambda: asyncio.run(main_task()))


def _end_when_orphaned(parent: int) -> NoReturn:
    """A rank that only follows, waiting in a collective, hears no signal and sees no event."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


async def _stop_when_orphaned(parent: int, stop: asyncio.Event) -> None:
    """Where the kernel does not end a child with its parent, this does."""
    while not stop.is_set():
        if os.getppid() != parent:
            stop.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1)


def _guard(work: Callable[[], T]) -> T:
    """The command line's boundary: our errors become one line and exit code 1."""
    try:
        return work()
    except OnlineSaoError as error:
        _fail(str(error))
    except ExceptionGroup as group:
        ours, others = group.split(OnlineSaoError)
        if others is not None or ours is None:
            raise
        _fail("; ".join(str(error) for error in ours.exceptions))


def _fail(message: str) -> NoReturn:
    err.print(f"[red]online-sao:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    for noisy in ("httpx", "apscheduler", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
