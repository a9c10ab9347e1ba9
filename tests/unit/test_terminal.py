"""The terminal: the numbers are there, what came from outside is inert, a failure is one line."""

from __future__ import annotations

import asyncio
import io
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from judged import serve_and_judge
from rich.console import Console, RenderableType

from online_sao import terminal
from online_sao.config import load_settings
from online_sao.engines.scripted import ScriptedEngine
from online_sao.errors import ConfigError, EngineError
from online_sao.gateway.app import create_app
from online_sao.ports import listen
from online_sao.store.memory import MemoryStore
from online_sao.types import (
    UPDATE_PREFIX,
    Feedback,
    FeedbackReceipt,
    Ledger,
    LedgerState,
    NewVersion,
    PolicyVersion,
    RolloutRequest,
    Update,
    UpdateKind,
    VersionState,
    new_id,
)

KEY = "sk-sao-test"
NOON = datetime(2026, 3, 1, 12, 34, 56, tzinfo=UTC)


def shown(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str, first: str) -> list[str]:
    """The cells of the table row that begins with `first`."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    (row,) = [row for row in rows if row and row[0] == first]
    return row


# -- the chat ------------------------------------------------------------------------------------


class HearingStore(MemoryStore):
    """The shipped double, which also remembers what it was asked and told."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[RolloutRequest] = []
        self.told: list[Feedback] = []

    async def insert_rollout(self, request: RolloutRequest) -> None:
        await super().insert_rollout(request)
        self.asked.append(request)

    async def add_feedback(self, feedback: Feedback) -> FeedbackReceipt:
        self.told.append(feedback)
        return await super().add_feedback(feedback)


@dataclass
class Served:
    """A gateway over doubles, on a real port."""

    url: str
    engine: ScriptedEngine
    store: HearingStore = field(default_factory=HearingStore)


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve `app` in a thread of its own; its URL."""
    bound = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound.sock]})
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.01)
        yield bound.url
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    engine, store = ScriptedEngine(version=3, replies=["Fine, thanks."]), HearingStore()
    app = create_app(engine=engine, store=store, settings=load_settings(environ={}), admin_key=KEY)
    with listening(app) as url:
        yield Served(url, engine, store)


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the person types, line by line; then the input ends."""

    def set_lines(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return set_lines


def test_reply_is_shown_with_its_version_and_plus_rates_that_very_reply(
    served: Served, types: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    types("How are you?", "+", "")
    terminal.chat(served.url, KEY)
    printed = capsys.readouterr().out
    assert "online-sao: Fine, thanks.\n" in printed
    assert "policy version 3, can be learned from" in printed
    assert "+ accepted" in printed
    (request,), (feedback,) = served.store.asked, served.store.told
    assert [(m.role, m.content) for m in request.messages] == [("user", "How are you?")]
    assert request.stream
    assert (feedback.rollout_id, feedback.metric) == (request.id, "thumbs")
    assert feedback.value is True


def test_minus_is_a_thumb_down_and_enter_is_none(
    served: Served, types: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    types("One?", "-", "Two?", "", "")
    terminal.chat(served.url, KEY)
    first, second = served.store.asked
    assert [(f.rollout_id, f.value) for f in served.store.told] == [(first.id, False)]
    assert [m.content for m in second.messages] == ["One?", "Fine, thanks.", "Two?"]


def test_question_typed_in_place_of_a_thumb_is_the_next_message(
    served: Served, types: Callable[..., None]
) -> None:
    types("One?", "Two?", "+")
    terminal.chat(served.url, KEY)
    second = served.store.asked[1]
    assert [m.content for m in second.messages] == ["One?", "Fine, thanks.", "Two?"]
    assert [(f.rollout_id, f.value) for f in served.store.told] == [(second.id, True)]


def test_new_starts_over(served: Served, types: Callable[..., None]) -> None:
    types("One?", "", "/new", "Two?", "/new", "Three?")
    terminal.chat(served.url, KEY)
    assert [[m.content for m in r.messages] for r in served.store.asked] == [
        ["One?"],
        ["Two?"],
        ["Three?"],
    ]


def test_reply_with_markup_and_escape_sequences_is_shown_and_does_nothing(
    served: Served, types: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    served.engine.backend.replies = ["[red]a[/red] [/] \x1b]0;title\x07b\x9b31m\r\n\tc 👩‍🚀"]
    types("Hi")
    terminal.chat(served.url, KEY)
    assert "[red]a[/red] [/] ]0;titleb31m\n" in (printed := capsys.readouterr().out)
    assert "c 👩‍🚀" in printed
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(printed)


def test_reply_that_cannot_be_learned_from_says_why(
    served: Served, types: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    served.engine.faults.drop_last_logprob = True
    types("Hi")
    terminal.chat(served.url, KEY)
    assert "not learned from (logprob_missing)" in capsys.readouterr().out


def test_wrong_key_is_said_in_the_services_words(served: Served) -> None:
    with pytest.raises(EngineError, match=r"^401: .*key"):
        terminal.chat(served.url, "sk-wrong")


def test_error_of_the_service_is_one_line_in_its_words(
    served: Served, types: Callable[..., None]
) -> None:
    served.engine.faults.refuse = "this template takes no questions"
    types("Hi")
    with pytest.raises(EngineError, match=r"^400: .*this template takes no questions"):
        terminal.chat(served.url, KEY)


def test_engine_that_dies_in_mid_reply_is_told_on_a_line_of_its_own(
    served: Served, types: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    served.engine.faults.die_after = 4
    types("Hi")
    with pytest.raises(EngineError) as caught:
        terminal.chat(served.url, KEY)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out.endswith("Fine\n")


def test_nobody_there_is_said_with_the_address_and_what_to_do() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{url}.*online-sao up"):
            terminal.chat(url, KEY)


@pytest.mark.parametrize("url", ["not-a-url", "http://127.0.0.1:port", "ftp://127.0.0.1"])
def test_address_that_is_none_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        terminal.chat(url, KEY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (200, b"<html>hello</html>", ConfigError, "is not online-sao"),
        (200, b'{"data": []}', ConfigError, "is not online-sao"),
        (200, b"[1]", ConfigError, "is not online-sao"),
        (502, b"<html>bad gateway</html>", EngineError, "answered 502"),
        (500, b'{"error": "no object"}', EngineError, "answered 500"),
    ],
)
def test_something_else_on_that_port_is_told_in_one_line(
    status: int, body: bytes, error: type[Exception], words: str
) -> None:
    async def stranger(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": body})

    with listening(stranger) as url, pytest.raises(error, match=words):
        terminal.chat(url, KEY)


def test_service_that_goes_away_in_mid_reply_is_an_error_of_ours(
    types: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "online-sao"}]})
        raise httpx.RemoteProtocolError("peer closed connection")

    client = httpx.Client(base_url="http://t", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(terminal, "_client", lambda base_url, key: client)
    types("Hi")
    with pytest.raises(EngineError, match="does not answer: peer closed connection"):
        terminal.chat("http://t", KEY)


# -- the status ----------------------------------------------------------------------------------


async def busy_store(root: Path) -> MemoryStore:
    """Two versions, two trained replies, one judged, an alarm, a learner that is paused."""
    store = MemoryStore()
    await store.add_base_version(str(root / "model"), "a" * 64)
    await store.mark_live(0, {})
    ids = await serve_and_judge(store, 2, reward=1)
    await serve_and_judge(store, 1, reward=0)
    await store.claim_trajectories(
        "l", size=2, lease_s=9, max_lag=9, max_train_tokens=99, skip_cut=False
    )
    await store.commit_update(
        "l",
        Update(
            new_id(UPDATE_PREFIX), NOON, UpdateKind.POLICY, tuple(ids),
            {"reward_mean": 0.8125, "explained_variance": None, "clip_ratio": 0.0021,
             "kl_start": 0.0375},
            note="[resumed] from [/] an older state",
        ),
        NewVersion(str(root / "v1"), "b" * 64, 0),
    )  # fmt: skip
    await store.put_note("learner", {"paused": True})
    await store.put_note("learner_heartbeat", {"state": "waiting", "updates": 17})
    await store.raise_alarm("swap_failed", "version 1: [/red] \x1b[2J no")
    return store


async def test_status_as_json_says_where_everything_stands(tmp_path: Path) -> None:
    status = await terminal.read_status(await busy_store(tmp_path))
    assert (status["live_version"], status["unpublished"]) == (0, 1)
    assert status["learner_paused"] is True
    assert status["learner"]["updates"] == 17
    assert status["reward"] == {"count": 3, "mean": pytest.approx(2 / 3)}
    (update,) = status["updates"]
    assert (update["kind"], update["version"]) == ("policy", 1)
    assert update["metrics"]["reward_mean"] == 0.8125
    assert [(a["name"], a["count"]) for a in status["alarms"]] == [("swap_failed", 1)]
    assert status["ledger"]["requests"] == 3
    assert status["ledger"]["counts"]["trained"] == 2
    assert status["ledger"]["adds_up"] is True


async def test_status_shows_the_numbers_and_outside_text_as_it_is(tmp_path: Path) -> None:
    text = shown(terminal.status_view(await terminal.read_status(await busy_store(tmp_path))))
    assert re.search(r"serving version +0 ", text)
    assert "paused, 17 updates" in text
    assert "0.667 (3 judged)" in text
    assert cells(text, "12:34:56") == [
        "12:34:56", "policy", "1", "0.812", "-", "0.0021", "0.0375",
        "[resumed] from [/] an older state",
    ]  # fmt: skip
    assert "ALARM swap_failed: version 1: [/red] [2J no" in text
    assert "3 requests" in text
    assert cells(text, "trained") == ["trained", "2", ""]
    assert cells(text, "judged") == ["judged", "1", ""]


async def test_status_of_a_service_that_never_served_says_so() -> None:
    text = shown(terminal.status_view(await terminal.read_status(MemoryStore())))
    assert "not started, 0 updates" in text
    assert "none yet (0 judged)" in text
    assert "0 requests" in text


async def test_live_status_is_redrawn_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "REFRESH_S", 0.01)
    store, reads = await busy_store(tmp_path), 0
    read, ten = store.live_version, asyncio.Event()

    async def counted() -> PolicyVersion | None:
        nonlocal reads
        reads += 1
        if reads == 10:
            ten.set()
        return await read()

    monkeypatch.setattr(store, "live_version", counted)
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    watching = asyncio.create_task(terminal.watch_status(store, console))
    await asyncio.wait_for(ten.wait(), 10)
    watching.cancel()
    await asyncio.wait_for(watching, 5)  # ends, and is no error
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("paused, 17 updates") >= 2


# -- the ledger and the versions -----------------------------------------------------------------


def book(*problems: str) -> Ledger:
    return Ledger(
        12,
        {LedgerState.TRAINED: 7, LedgerState.NOT_TRAINABLE: 5},
        {LedgerState.NOT_TRAINABLE: {"greedy": 3, "opt_[/]_out": 2}, LedgerState.TRAINED: {}},
        problems,
    )


def test_ledger_shows_counts_with_their_reasons_and_that_it_adds_up() -> None:
    text = shown(terminal.ledger_view(book()))
    assert "12 requests" in text
    assert cells(text, "trained") == ["trained", "7", ""]
    assert cells(text, "not_trainable") == ["not_trainable", "5", "greedy 3, opt_[/]_out 2"]
    assert "expired" not in text
    assert "It adds up." in text


def test_ledger_names_each_identity_that_is_broken() -> None:
    text = shown(terminal.ledger_view(book("13 were counted, 12 stand", "2 lack [a] lease")))
    assert "It adds up." not in text
    assert text.splitlines()[-3:] == [
        "It does NOT add up:",
        "13 were counted, 12 stand",
        "2 lack [a] lease",
    ]


def test_ledger_as_json_has_every_state_and_only_reasons_that_occur() -> None:
    told = terminal.ledger_json(book("broken"))
    assert set(told["counts"]) == {state.value for state in LedgerState}
    assert sum(told["counts"].values()) == told["requests"] == 12
    assert told["reasons"] == {"not_trainable": {"greedy": 3, "opt_[/]_out": 2}}
    assert (told["adds_up"], told["problems"]) == (False, ["broken"])


def test_versions_are_shown_with_parent_state_time_and_hash() -> None:
    base = PolicyVersion(0, None, "/v/0", "a1" * 32, VersionState.RETIRED, NOON)
    first = PolicyVersion(1, 0, "/v/1", "b2" * 32, VersionState.LIVE, NOON)
    text = shown(terminal.versions_view([first, base]))
    assert cells(text, "1") == ["1", "0", "live", "2026-03-01 12:34:56", "b2b2b2b2b2b2"]
    assert cells(text, "0") == ["0", "-", "retired", "2026-03-01 12:34:56", "a1a1a1a1a1a1"]
    assert terminal.version_json(first) == {
        "number": 1,
        "parent": 0,
        "state": "live",
        "created_at": "2026-03-01T12:34:56+00:00",
        "sha256": "b2" * 32,
        "path": "/v/1",
        "gate": "passed",
    }
