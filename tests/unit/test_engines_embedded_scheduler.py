"""What is in which step, with a decoder that counts instead of computing."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from online_sao.engines.embedded.reply import Reply
from online_sao.engines.embedded.scheduler import (
    BURST_TOKENS,
    PREFILL_TOKENS,
    Event,
    Scheduler,
)
from online_sao.errors import EngineUnavailable
from online_sao.types import ReplyChunk, Sampling, VersionSpan

V = 1000


class Counting:
    """Says after every row how many tokens it has: the next token is the row's length."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.scratch: list[int] = []
        self.steps: list[tuple[str, int]] = []

    def set_model(self, model: Any) -> None:
        self.rows, self.scratch = [], []
        self.steps.append(("model", 0))

    def _logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        logits = torch.full((len(rows), V), -50.0)
        for i, row in enumerate(rows):
            logits[i, len(row) % V] = 50.0
        return logits

    def prefill(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        self.steps.append(("prefill", sum(map(len, rows))))
        self.rows += [list(row) for row in rows]
        return self._logits(rows)

    def prefill_scratch(self, tokens: Sequence[int]) -> torch.Tensor:
        self.steps.append(("scratch", len(tokens)))
        self.scratch += tokens
        return self._logits([self.scratch])

    def adopt_scratch(self) -> None:
        self.rows.append(self.scratch)
        self.scratch = []

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        self.steps.append(("decode", len(tokens)))
        assert len(tokens) == len(self.rows)
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        return self._logits(self.rows)

    def drop(self, row: int) -> None:
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    def drop_scratch(self) -> None:
        self.scratch = []

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._logits([tokens[: n + 1] for n in range(len(tokens))])

    def release(self) -> None:
        self.steps.append(("release", 0))


class NoWords:
    def decode(self, ids: Any) -> str:
        return ""

    def token(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        return "", ()


class World:
    """A running scheduler; what each reply got."""

    def __init__(self) -> None:
        self.decoder = Counting()
        self.scheduler = Scheduler(self.decoder, 3, max_rows=4, threads=1, deliver=self.deliver)
        self.got: dict[str, list[ReplyChunk | Exception]] = {}
        self.done: queue.Queue[str] = queue.Queue()

    def deliver(self, events: Sequence[Event]) -> None:
        for reply, event in events:
            self.got.setdefault(reply.request_id, []).append(event)
            if isinstance(event, Exception) or event.finish_reason is not None:
                self.done.put(reply.request_id)

    def submit(self, name: str, length: int, tokens: int) -> Reply:
        reply = Reply(
            request_id=name,
            prompt_ids=(1,) * length,
            sampling=Sampling(temperature=0.0),
            max_tokens=tokens,
            eos_ids=frozenset(),
            vocabulary=NoWords(),  # type: ignore[arg-type]
            sink=lambda _: None,
        )
        self.scheduler.submit(reply)
        return reply

    def wait(self, count: int) -> set[str]:
        return {self.done.get(timeout=10) for _ in range(count)}

    def ids(self, name: str) -> list[int]:
        return [i for c in self.got[name] if isinstance(c, ReplyChunk) for i in c.token_ids]

    def do(self, work: Any) -> Any:
        return self.scheduler.call(work).result(timeout=10)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.scheduler.start()
    yield made
    made.scheduler.stop()


def test_every_reply_gets_its_own_tokens_though_more_came_than_there_are_rows(
    world: World,
) -> None:
    """Each token is the length of its row: one wrong row or place would show."""
    lengths = {f"r{i}": (3 + 7 * i, 5 + i) for i in range(11)}
    for name, (length, tokens) in lengths.items():
        world.submit(name, length, tokens)
    assert world.wait(11) == set(lengths)
    for name, (length, tokens) in lengths.items():
        assert world.ids(name) == list(range(length, length + tokens))
    assert max(count for what, count in world.decoder.steps if what == "decode") <= 4


def test_a_long_prompt_is_read_in_parts_between_which_others_decode(world: World) -> None:
    world.submit("short", 10, 30)
    world.submit("long", 3 * PREFILL_TOKENS + 5, 2)
    world.wait(2)
    assert world.ids("long") == [(3 * PREFILL_TOKENS + 5 + i) % V for i in range(2)]
    parts = [i for i, (what, _) in enumerate(world.decoder.steps) if what == "scratch"]
    assert [world.decoder.steps[i][1] for i in parts] == [PREFILL_TOKENS] * 3 + [5]
    for before, after in itertools.pairwise(parts):
        assert ("decode", 1) in world.decoder.steps[before:after]


def test_no_step_prefills_more_than_its_share(world: World) -> None:
    """More wait than stream: up to BURST_TOKENS at once; else up to PREFILL_TOKENS."""
    world.do(world.scheduler.pause)
    for i in range(4):
        world.submit(f"r{i}", PREFILL_TOKENS, 50 if i < 3 else 2)
    world.submit("late", 200, 3)
    world.submit("later", 200, 3)
    world.do(world.scheduler.resume)
    world.wait(6)
    prefills = [n for what, n in world.decoder.steps if what == "prefill"]
    assert prefills == [BURST_TOKENS, BURST_TOKENS, 200, 200]


def test_a_swap_in_mid_flight_recomputes_every_row_under_the_new_model(world: World) -> None:
    world.submit("a", 5, 400)
    world.submit("b", PREFILL_TOKENS + 9, 400)
    while len(world.got.get("b", [])) < 3:
        world.do(lambda: None)
    world.do(lambda: world.scheduler.swap(torch.nn.Identity(), 4))
    world.wait(2)
    for name, length in (("a", 5), ("b", PREFILL_TOKENS + 9)):
        assert world.ids(name) == [(length + i) % V for i in range(400)]
        last = world.got[name][-1]
        assert isinstance(last, ReplyChunk)
        first, second = last.version_spans
        assert (first.version, second) == (3, VersionSpan(4, first.end, 400))
    after = world.decoder.steps[world.decoder.steps.index(("model", 0)) :]
    assert [what for what, _ in after].count("scratch") >= 2


def test_while_paused_nothing_moves_and_nothing_is_lost(world: World) -> None:
    world.do(world.scheduler.pause)
    world.submit("r", 4, 3)
    world.do(lambda: None)
    assert world.scheduler.paused
    assert world.scheduler.in_flight() == 1
    assert world.got == {}
    world.do(world.scheduler.resume)
    assert world.wait(1) == {"r"}
    assert world.ids("r") == [4, 5, 6]


def test_aborting_frees_the_row_and_tells_the_reply(world: World) -> None:
    world.do(world.scheduler.pause)
    gone = world.submit("gone", 4, 500)
    world.submit("named", 4, 500)
    world.submit("stays", 4, 3)
    world.scheduler.abort(gone)
    world.scheduler.abort_named(frozenset({"named"}))
    world.do(world.scheduler.resume)
    assert world.wait(3) == {"gone", "named", "stays"}
    for name in ("gone", "named"):
        last = world.got[name][-1]
        assert isinstance(last, ReplyChunk)
        assert last.finish_reason == "abort"
    assert world.scheduler.in_flight() == 0


def test_scores_are_log_probabilities_and_disturb_nobody(world: World) -> None:
    world.submit("r", PREFILL_TOKENS + 3, 40)
    scores = world.do(lambda: world.scheduler.score([1, 1, 2, 9]))
    assert scores == pytest.approx([0.0, 0.0, -100.0], abs=1e-4)
    world.wait(1)
    assert world.ids("r") == [(PREFILL_TOKENS + 3 + i) % V for i in range(40)]


def test_memory_is_given_back_when_nobody_is_left(world: World) -> None:
    world.submit("r", 4, 3)
    world.wait(1)
    world.do(lambda: None)
    world.do(lambda: None)
    assert world.decoder.steps[-1] == ("release", 0)


def test_what_fails_between_two_steps_fails_for_its_caller_alone(world: World) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        world.do(fail)
    world.submit("r", 4, 2)
    assert world.wait(1) == {"r"}


def test_stopping_ends_what_is_in_flight_with_an_error() -> None:
    world = World()
    world.scheduler.start()
    world.do(world.scheduler.pause)
    world.submit("r", 4, 2)
    world.scheduler.stop()
    assert isinstance(world.got["r"][-1], EngineUnavailable)
