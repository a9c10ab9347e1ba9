"""The command line: every command explains itself, a mistake is one line, numbers are true."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import sqlite3
import threading
import tomllib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from judged import serve_and_judge
from typer.testing import CliRunner

import online_sao
from online_sao import cli, doctor, terminal, wiring
from online_sao.config import Settings, load_settings, to_toml
from online_sao.datafolder import DataFolder
from online_sao.errors import EngineError, EngineUnavailable, StoreError
from online_sao.types import (
    UPDATE_PREFIX,
    LedgerState,
    NewVersion,
    Update,
    UpdateKind,
    new_id,
    utc_now,
)

runner = CliRunner()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ONLINE_SAO_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)  # where `data` is nobody's


def run(*args: object, code: int = 0) -> str:
    """What the command prints. With `code` 1 it must be one clear line on stderr."""
    result = runner.invoke(cli.app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    if code == 1 and result.stderr:
        assert result.stderr.startswith("online-sao: ")
        assert result.stderr.count("\n") == 1
        return result.stderr
    return result.output


def commands(group: Any, *path: str) -> list[tuple[str, str]]:
    """Every command and group as it is typed, with the text that explains it."""
    found = [(" ".join(path), str(group.help))]
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, *path, name)
    return found


# -- a data folder -------------------------------------------------------------------------------


async def fill(store: Any, root: Path) -> None:
    """Five requests: two trained, one judged, one not, one in flight; version 1 waits."""
    await store.add_base_version(str(root / "model"), "a" * 64)
    await store.mark_live(0, {})
    trained = await serve_and_judge(store, 2)
    await serve_and_judge(store, 1, reward=0)
    await store.claim_trajectories(
        "learner", size=2, lease_s=60, max_lag=9, max_train_tokens=99, skip_cut=False
    )
    update = Update(
        new_id(UPDATE_PREFIX), utc_now(), UpdateKind.POLICY, tuple(trained), {"reward_mean": 1.0}
    )
    await store.commit_update("learner", update, NewVersion(str(root / "v1"), "b" * 64, 0))
    first = (await store.get_rollout(trained[0])).request
    for _ in range(2):
        request = type(first)(
            new_id("chatcmpl-"), utc_now(), first.messages, first.sampling, first.session_id
        )
        await store.insert_rollout(request)
    await store.fail_orphans(request.created_at, "engine_unavailable")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "data"
    settings = load_settings(overrides={"service": {"data": root}}, environ={})
    DataFolder(root).create()
    wiring.migrate(settings)

    async def work() -> None:
        store = wiring.make_store(settings)
        await store.open()
        await fill(store, root)
        await store.aclose()

    asyncio.run(work())
    return root


@pytest.fixture
def data(template: Path, tmp_path: Path) -> Path:
    """A data folder with what `fill` put into it."""
    return Path(shutil.copytree(template, tmp_path / "data"))


def note(data: Path, key: str) -> Any:
    with closing(sqlite3.connect(data / "online-sao.db")) as database:
        (value,) = database.execute("SELECT value FROM notes WHERE key = ?", [key]).fetchone()
    return json.loads(value)


# -- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "explained"), commands(typer.main.get_command(cli.app)))
def test_every_command_says_what_it_does(command: str, explained: str) -> None:
    printed = run(*command.split(), "--help")
    assert "Usage: " in printed
    sentence = explained.splitlines()[0]
    assert sentence.endswith(".")
    assert len(sentence.split()) > 2
    assert " ".join(sentence.split()[:3]) in printed
    assert printed == run(*command.split(), "-h")


def test_learn_is_not_listed_and_all_else_is() -> None:
    printed = run("--help")
    for name in ("up", "chat", "status", "ledger", "doctor", "config", "policies", "learner"):
        assert f" {name} " in printed
    assert " learn " not in printed


def test_version_is_the_packages() -> None:
    assert run("--version") == f"{online_sao.__version__}\n"


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--nonsense"], ["up", "--nonsense"], ["status", "--nonsense"]])
def test_unknown_option_is_named(args: list[str]) -> None:
    assert "--nonsense" in run(*args, code=2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["up", "--engine", "fancy"], "unknown engine 'fancy': embedded, scripted, vllm"),
        (["up", "--engine", "vllm"], "start a server and pass its URL"),
        (["up", "--preset", "fancy"], "`preset`: Input should be 'paper', 'online' or"),
        (["up", "--port", "70000"], "`service.port`"),
        (["config", "show", "--config", "[none].toml"], "no settings file [none].toml"),
        (["learn", "--config", "none.toml"], "no settings file none.toml"),
        (["learn"], "there is no database"),
        (["chat"], "there is no key in data/admin.key"),
    ],
)
def test_mistake_is_one_line_that_names_it(args: list[str], words: str, tmp_path: Path) -> None:
    assert words in run(*args, code=1)
    assert list(tmp_path.iterdir()) == []  # and nothing was begun


def test_unknown_setting_is_named_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text("[learner]\nbatchsize = 3\n")
    assert "unknown setting `learner.batchsize`" in run(
        "config", "show", "--config", "a.toml", code=1
    )
    (tmp_path / "b.toml").write_text("[learner\n")
    assert "b.toml is not valid TOML" in run("up", "--config", "b.toml", code=1)
    monkeypatch.setenv("ONLINE_SAO_LEARNR__BATCH_SIZE", "3")
    assert "unknown setting `learnr`" in run("up", code=1)


@pytest.mark.parametrize(
    "command",
    ["status", "status --json", "status --once", "ledger", "ledger --json", "policies list",
     "learner pause", "learner resume"],
)  # fmt: skip
@pytest.mark.parametrize("there", [True, False])
def test_folder_that_is_no_data_folder_is_named_and_left_as_it_is(
    tmp_path: Path, command: str, there: bool
) -> None:
    folder = tmp_path / "[some] folder"
    if there:
        folder.mkdir()
    said = run(*command.split(), "--data", folder, code=1)
    assert f"{folder} is no data folder" in said
    assert list(tmp_path.rglob("*")) == ([folder] if there else [])


def test_data_folder_whose_database_is_gone_is_named(data: Path) -> None:
    DataFolder(data).running_settings.write_text("")
    (data / "online-sao.db").unlink()
    assert "there is no database" in run("status", "--data", data, code=1)
    assert not (data / "online-sao.db").exists()


def test_port_that_is_taken_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = run("up", "--data", tmp_path / "d", "--engine", "scripted", "--port", port, code=1)
    assert f"127.0.0.1:{port}" in said
    assert not (tmp_path / "d" / "online-sao.db").exists()


def test_second_service_on_one_data_folder_is_refused(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "d")
    folder.create()
    with folder.lock():
        said = run("up", "--data", folder.root, "--engine", "scripted", "--port", 0, code=1)
    assert f"{folder.root} is in use by process {os.getpid()}" in said


# -- settings ------------------------------------------------------------------------------------


def test_config_shown_is_a_file_that_gives_the_same_settings_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text('[learner]\nbatch_size = 5\n[policy]\nmodel = "a\\\\b"\n')
    monkeypatch.setenv("ONLINE_SAO_LEARNER__MAX_LAG", "3")
    printed = run("config", "show", "-c", "mine.toml", "--preset", "interactive", "-d", "e f")
    (tmp_path / "shown.toml").write_text(printed)
    shown = load_settings(tmp_path / "shown.toml", environ={})
    assert shown.preset == "interactive"
    assert (shown.learner.batch_size, shown.learner.max_lag) == (5, 3)
    assert shown.judging.feedback_wait_s == 20.0
    assert (shown.policy.model, shown.service.data) == ("a\\b", Path("e f"))
    monkeypatch.delenv("ONLINE_SAO_LEARNER__MAX_LAG")
    assert run("config", "show", "-c", "shown.toml") == printed


def test_config_shows_what_every_setting_does_and_never_the_admin_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONLINE_SAO_ADMIN_KEY", "sk-secret")
    printed = run("config", "show")
    assert "sk-secret" not in printed
    lines = printed.splitlines()
    settings = [i for i, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(settings) == 1 + sum(len(section) for section in sections(printed).values())
    assert all(lines[i - 1].startswith("# ") for i in settings if i > 0)


def sections(printed: str) -> Mapping[str, Mapping[str, Any]]:
    return {k: v for k, v in tomllib.loads(printed).items() if isinstance(v, dict)}


# -- looking at a data folder --------------------------------------------------------------------


def test_status_as_json_says_where_everything_stands(data: Path) -> None:
    status = json.loads(run("status", "--data", data, "--json"))
    assert (status["live_version"], status["unpublished"]) == (0, 1)
    assert status["reward"] == {"count": 3, "mean": pytest.approx(2 / 3)}
    assert [(u["kind"], u["version"]) for u in status["updates"]] == [("policy", 1)]
    assert status["learner_paused"] is False
    assert status["ledger"]["requests"] == 5


def test_status_once_is_for_people(data: Path) -> None:
    printed = run("status", "--data", data, "--once")
    assert "0.667 (3 judged)" in printed
    assert "5 requests" in printed
    assert printed == run("status", "--data", data)  # live only where there is a terminal


def test_ledger_that_adds_up_exits_0(data: Path) -> None:
    told = json.loads(run("ledger", "--data", data, "--json"))
    assert told["adds_up"] is True
    assert told["requests"] == 5
    assert set(told["counts"]) == {state.value for state in LedgerState}
    assert {state: n for state, n in told["counts"].items() if n} == {
        "trained": 2,
        "judged": 1,
        "failed": 1,
        "in_flight": 1,
    }
    assert told["reasons"] == {"failed": {"engine_unavailable": 1}}
    printed = run("ledger", "--data", data)
    assert "engine_unavailable 1" in printed
    assert "It adds up." in printed


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE counters SET value = value + 1", "6 requests were counted, but 5 stand"),
        (
            "UPDATE ledger_entries SET state = 'judged' WHERE state = 'trained'",
            "2 rollouts were in an update of kind policy, but are judged",
        ),
        ("UPDATE policy_versions SET state = 'live'", "2 policy versions are live"),
    ],
)
def test_ledger_that_does_not_add_up_says_why_and_exits_1(
    data: Path, statement: str, problem: str
) -> None:
    with closing(sqlite3.connect(data / "online-sao.db")) as database, database:
        database.execute(statement)
    printed = run("ledger", "--data", data, code=1)
    assert "It does NOT add up:" in printed
    assert problem in printed
    told = json.loads(run("ledger", "--data", data, "--json", code=1))
    assert told["adds_up"] is False
    assert any(problem in said for said in told["problems"])


def test_policies_are_listed_newest_first(data: Path) -> None:
    listed = json.loads(run("policies", "list", "--data", data, "--json"))
    assert [(v["number"], v["parent"], v["state"], v["sha256"]) for v in listed] == [
        (1, 0, "stable", "b" * 64),
        (0, None, "live", "a" * 64),
    ]
    printed = run("policies", "list", "--data", data)
    assert printed.index("bbbbbbbbbbbb") < printed.index("aaaaaaaaaaaa")


def test_learner_is_paused_and_resumed_by_a_note_that_status_shows(data: Path) -> None:
    assert "paused" in run("learner", "pause", "--data", data)
    assert note(data, "learner") == {"paused": True}
    assert json.loads(run("status", "--data", data, "--json"))["learner_paused"] is True
    assert "learns" in run("learner", "resume", "--data", data)
    assert note(data, "learner") == {"paused": False}
    assert json.loads(run("status", "--data", data, "--json"))["learner_paused"] is False


def test_folder_is_looked_at_as_its_service_was_started_wherever_it_lies_now(
    data: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere.db"
    shutil.move(data / "online-sao.db", elsewhere)
    started = load_settings(
        overrides={
            "service": {"data": "/no/longer/there"},
            "store": {"url": f"sqlite:///{elsewhere}"},
        },
        environ={},
    )
    DataFolder(data).running_settings.write_text(to_toml(started))
    assert json.loads(run("ledger", "--data", data, "--json"))["requests"] == 5

    shutil.move(elsewhere, data / "online-sao.db")
    started = load_settings(overrides={"service": {"data": "/no/longer/there"}}, environ={})
    DataFolder(data).running_settings.write_text(to_toml(started))
    assert json.loads(run("ledger", "--data", data, "--json"))["requests"] == 5


# -- chat and doctor -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "environ", "expected"),
    [
        ([], {}, ("http://127.0.0.1:8123", "sk-stored")),
        (["--url", "http://h:1"], {}, ("http://h:1", "sk-stored")),
        ([], {"ONLINE_SAO_ADMIN_KEY": "sk-given"}, ("http://127.0.0.1:8123", "sk-given")),
    ],
)
def test_chat_finds_the_folders_service_and_its_key(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    environ: dict[str, str],
    expected: tuple[str, str],
) -> None:
    DataFolder(data).ensure_key("sk-stored")
    started = load_settings(overrides={"service": {"host": "0.0.0.0", "port": 8123}}, environ={})
    DataFolder(data).running_settings.write_text(to_toml(started))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    called: list[tuple[str, str]] = []
    monkeypatch.setattr(terminal, "chat", lambda url, key: called.append((url, key)))
    run("chat", "--data", data, *args)
    assert called == [expected]


def test_chat_with_nobody_there_is_one_line(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DataFolder(data).ensure_key("sk-stored")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        result = runner.invoke(cli.app, ["chat", "--data", str(data), "--url", url])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"online-sao: no service answers at {url}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("log_ratio", "code"), [(0.0009, 0), (0.001, 1)])
def test_doctor_exits_0_only_if_everything_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_ratio: float, code: int
) -> None:
    asked: list[int] = []

    async def compare(settings: Settings, replies: int) -> tuple[str, Mapping[str, float | None]]:
        asked.append(replies)
        return "F32", {"clip_ratio": 0.0, "log_ratio_abs_mean": log_ratio}

    monkeypatch.setattr(doctor, "compare", compare)
    monkeypatch.setattr(doctor, "NEEDED_GIB", 0.0)
    told = json.loads(run("doctor", "--data", tmp_path / "d", "--replies", 7, "--json", code=code))
    assert told["well"] is (code == 0)
    assert asked == [7]
    assert "--replies" in run("doctor", "--replies", 3, code=2)


# -- what the commands share ---------------------------------------------------------------------


def test_errors_of_ours_in_a_group_become_one_line_and_others_stay_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*errors: Exception) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", errors)

    with pytest.raises(typer.Exit) as left:
        cli._guard(lambda: fail(EngineUnavailable("no [engine]"), StoreError("no store")))
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == "online-sao: no [engine]; no store\n"
    with pytest.raises(ExceptionGroup):
        cli._guard(lambda: fail(EngineError("no engine"), KeyError("a bug")))
    bug: dict[str, str] = {}
    with pytest.raises(KeyError):
        cli._guard(lambda: bug["a bug"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_sets_the_stop_event_and_the_work_ends_by_itself(number: signal.Signals) -> None:
    ended = []

    async def work(stop: asyncio.Event) -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        await asyncio.wait_for(stop.wait(), 10)
        ended.append(number)

    cli._run_until_signal(work)
    assert ended == [number]


async def test_learner_whose_parent_died_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    watching = asyncio.create_task(cli._stop_when_orphaned(4711, stop))
    await asyncio.sleep(0.05)
    assert not stop.is_set()
    watching.cancel()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    await asyncio.wait_for(cli._stop_when_orphaned(4711, stop), 5)
    assert stop.is_set()
