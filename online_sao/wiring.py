"""Introduces the parts to each other: the only file that names concrete classes.

They are named as dotted names and imported when used, so that a process loads only what it
needs: the serving process never sees torch.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from online_sao.config import ENV_PREFIX, LIVE_VARIANTS, Settings
from online_sao.datafolder import DataFolder
from online_sao.errors import ConfigError, ModelError
from online_sao.interfaces import Engine, Store, Trainer
from online_sao.manifest import publish_folder

STORE = "online_sao.store.sql:SqlStore"
ENGINE = "online_sao.engines.client:HttpEngine"
TRAINER = "online_sao.learner.trainer:SaoTrainer"
SCRIPTED_TRAINER = "online_sao.learner.scripted:ScriptedTrainer"


def load(dotted: str) -> Any:
    """The object that `module:name` names. Raises ConfigError when there is none."""
    module_name, _, name = dotted.partition(":")
    if not name or not module_name or module_name.startswith("."):
        raise ConfigError(f"`{dotted}` is not of the form `module:name`")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`{dotted}` cannot be loaded: {error}") from error


def database_url(settings: Settings) -> str:
    """The configured database, or the data folder's own."""
    return settings.store.url or DataFolder(settings.service.data).database_url


def make_store(settings: Settings) -> Store:
    """The database, not opened yet."""
    return cast(Store, load(STORE)(database_url(settings)))


def migrate(settings: Settings) -> None:
    """Bring the database to this code's schema (blocking)."""
    load("online_sao.store.migrate:migrate")(database_url(settings))


def make_engine(settings: Settings, base_url: str) -> Engine:
    """A client of the engine at `base_url`."""
    return cast(
        Engine,
        load(ENGINE)(
            base_url,
            model=settings.policy.served_name,
            swap_timeout_s=settings.publishing.swap_timeout_s,
            probe_tolerance=settings.publishing.probe_tolerance,
            request_timeout_s=settings.service.request_timeout_s,
        ),
    )


def make_app(settings: Settings, store: Store, engine: Engine, admin_key: str) -> Any:
    """The HTTP application."""
    create_app = load("online_sao.gateway.app:create_app")
    return create_app(engine=engine, store=store, settings=settings, admin_key=admin_key)


def make_judging_worker(settings: Settings, store: Store, owner: str) -> Any:
    """The worker that judges."""
    return load("online_sao.judging:JudgingWorker")(store, settings.judging, owner=owner)


def load_rubric(settings: Settings) -> Any:
    """The configured rubric, checked by its judge."""
    return load("online_sao.rubrics:load_rubric")(settings.judging.rubric)


def make_publisher(settings: Settings, store: Store, engine: Engine) -> Any:
    """The publisher."""
    folder = DataFolder(settings.service.data)
    return load("online_sao.publishing:Publisher")(
        store, engine, settings.publishing, versions_dir=folder.versions.resolve()
    )


def make_trainer(settings: Settings, ranks: Any = None) -> Trainer:
    """The trainer that goes with the engine: the scripted one needs no model.

    With `ranks` (see `join_ranks`), this process' part of a trainer they share.
    """
    start_policy = DataFolder(settings.service.data).model.resolve()
    if settings.engine.kind == "scripted":
        return cast(Trainer, load(SCRIPTED_TRAINER)())
    shared = () if ranks is None else (ranks,)
    return cast(Trainer, load(TRAINER)(settings.algorithm, settings.learner, start_policy, *shared))


def join_ranks(environ: Mapping[str, str] = os.environ) -> Any:
    """Meet the processes that torchrun started beside this one; None where it started none."""
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        return None
    return load("online_sao.learner.ranks:Ranks").join(environ)


def make_crew(settings: Settings, ranks: Any) -> Any:
    """Rank 0's trainer: what it is told, all ranks do, until they are dismissed."""
    return load("online_sao.learner.crew:CrewTrainer")(make_trainer(settings, ranks), ranks)


def follow(settings: Settings, ranks: Any) -> None:
    """Do what rank 0 says, until it dismisses us (blocking)."""
    load("online_sao.learner.crew:follow")(make_trainer(settings, ranks), ranks)
    ranks.leave()


def check_live(settings: Settings) -> None:
    """Raises ConfigError for settings that a service cannot learn with."""
    settings.learner.check_ranks(settings.learner.ranks)
    variant = settings.algorithm.variant
    if variant == "running_mean" and settings.algorithm.running_mean_per == "prompt":
        raise ConfigError(
            "algorithm.running_mean_per = prompt needs prompts that come again: a service takes "
            "the mean over all; `online-sao ablate` runs it"
        )
    if not settings.algorithm.has_critic and load_rubric(settings).episodes == "each":
        raise ConfigError(
            f"algorithm.variant = {variant} knows one reward an episode: use a rubric without "
            '`episodes = "each"`, or a variant with a critic'
        )
    if variant not in LIVE_VARIANTS:
        raise ConfigError(
            f"algorithm.variant = {variant} needs prompts that come again, which live traffic does "
            f"not bring: `online-sao ablate` runs it; a service learns with "
            f"{', '.join(LIVE_VARIANTS)}"
        )


def make_learner(settings: Settings, store: Store, trainer: Trainer) -> Any:
    """The learner's loop. Raises ConfigError for a variant that live traffic cannot feed."""
    check_live(settings)
    folder = DataFolder(settings.service.data)
    return load("online_sao.learner.loop:Learner")(
        store,
        trainer,
        settings,
        versions_dir=folder.versions.resolve(),
        state_dir=folder.learner_states.resolve(),
    )


def engine_command(
    settings: Settings, *, model: Path, version: int, port: int, threads: int
) -> list[str]:
    """The argv of the engine's process."""
    name = "scripted_command" if settings.engine.kind == "scripted" else "embedded_command"
    builder: Callable[..., list[str]] = load(f"online_sao.engines.launch:{name}")
    return builder(settings, model, version, port, threads)


def prepare_command(settings: Settings, out: Path) -> list[str]:
    """The argv that makes version 0 of the configured model."""
    return [
        sys.executable, "-m", "online_sao.engines.embedded.prepare",
        "--model", settings.policy.model, "--out", str(out),
        "--max-model-len", str(settings.policy.max_model_len), "--dtype", settings.engine.dtype,
    ]  # fmt: skip


async def prepare_model(settings: Settings) -> None:
    """Make version 0 in the data folder, if it is not there yet. Raises ModelError.

    In a process of its own: this one must never load torch.
    """
    folder = DataFolder(settings.service.data)
    if (folder.model / "manifest.json").exists():
        return
    if folder.model.exists():
        raise ModelError(f"{folder.model} holds no whole model: move it away, then start again")
    if settings.engine.kind == "scripted":
        trainer = await asyncio.to_thread(make_trainer, settings)
        await asyncio.to_thread(_export_whole, trainer, folder.model)
        return
    process = await asyncio.create_subprocess_exec(*prepare_command(settings, folder.model))
    if await process.wait() != 0:
        raise ModelError(
            f"the model {settings.policy.model!r} could not be prepared (see above); name another "
            "with ONLINE_SAO_POLICY__MODEL or [policy] model"
        )


def _export_whole(trainer: Trainer, folder: Path) -> None:
    draft = folder.with_name(f"{folder.name}.draft")
    if draft.exists():  # an earlier attempt was cut short
        shutil.rmtree(draft)
    trainer.export_policy(draft)
    publish_folder(draft, folder)


STOP_S = 110
"""How long torchrun lets ranks finish their update and write their state; `up` waits longer."""


def learner_command(settings_file: Path, ranks: int = 1) -> list[str]:
    """The argv of the learner's process; of torchrun, where several share it."""
    work = ["-m", "online_sao", "learn", "--config", str(settings_file)]
    if ranks == 1:
        return [sys.executable, *work]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    patience = ["--shutdown-timeout", str(STOP_S)]
    return [sys.executable, *start, *patience, *work]


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_cores(settings: Settings) -> tuple[int, int]:
    """Threads of (engine, learner): what the settings say, else the rest, or half, of the cores."""
    total, given = cores(), settings.learner.threads
    engine = settings.engine.threads or max(1, total - given if given else total // 2)
    return engine, given or max(1, total - engine)


ENGINE_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "2"}
"""glibc: a tensor's memory goes back to the system when it is freed. Without it a swap, which
makes a whole model anew, leaves a part of it behind."""
LEARNER_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc: what is freed stays with the process. An update took 2.7 s instead of 3.4 with it."""


def child_environment(threads: int, memory: Mapping[str, str]) -> Mapping[str, str]:
    """The whole environment of a child that computes with `threads` threads.

    Settings reach it through its settings file alone. Waiting threads sleep instead of spinning.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    return {
        **inherited,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **memory,
    }
