"""The decode thread: which replies are in the next step, and what happens between two steps.

Everything here but the methods marked "any thread" runs in that one thread, so nothing needs a
lock. Requests wait in order of arrival; a step prefills some of them (a bounded number of tokens,
so that those who already stream do not stall) and then decodes one token for every row.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import nn

from online_sao.engines.embedded import sampler
from online_sao.engines.embedded.decoder import Decoder
from online_sao.engines.embedded.reply import Reply
from online_sao.errors import EngineUnavailable
from online_sao.types import ReplyChunk

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 512
"""Prompt tokens per step: about what one decoding step of 32 rows costs on two cores."""
BURST_TOKENS = 1024
"""The same while more replies wait than stream (a burst of requests, or after a swap)."""
EXIT_DECODE_FAILED = 70

T = TypeVar("T")
Event = tuple[Reply, ReplyChunk | Exception]


class Scheduler:
    """Owns the decoder and every reply in flight."""

    def __init__(
        self,
        decoder: Decoder,
        version: int,
        *,
        max_rows: int,
        threads: int,
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        self._decoder, self._version = decoder, version
        self._max_rows, self._threads, self._deliver = max_rows, threads, deliver
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Reply] = deque()
        self._running: list[Reply] = []
        self._scratch: Reply | None = None
        self._scratch_done = 0
        self._dirty = False
        self._paused = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    # -- any thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the present step; replies in flight end as aborted."""
        self._inbox.put(self._stop)
        self._thread.join(timeout=30)

    def submit(self, reply: Reply) -> None:
        """Queue a reply."""
        self._inbox.put(lambda: self._waiting.append(reply))

    def abort(self, reply: Reply) -> None:
        """Drop this reply before the next step."""
        self._inbox.put(lambda: self._abort(lambda other: other is reply))

    def abort_named(self, request_ids: frozenset[str]) -> None:
        """Drop all replies with these request ids before the next step."""
        self._inbox.put(lambda: self._abort(lambda reply: reply.request_id in request_ids))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for the future
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def in_flight(self) -> int:
        """Replies that are not complete (a snapshot)."""
        return len(self._waiting) + len(self._running) + (self._scratch is not None)

    @property
    def paused(self) -> bool:
        """Whether steps are held (a snapshot)."""
        return self._paused

    @property
    def version(self) -> int:
        """The version that the next token is sampled from (a snapshot)."""
        return self._version

    # -- between two steps: to be run by `call` ------------------------------------------------

    def pause(self) -> None:
        """Hold all steps; replies in flight stay."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False

    def swap(self, model: nn.Module, version: int) -> None:
        """Decode with `model` from now on; what is in flight is prefilled anew under it."""
        back = [*self._running, *([self._scratch] if self._scratch else [])]
        self._waiting.extendleft(reversed(back))
        self._running.clear()
        self._scratch, self._scratch_done = None, 0
        self._decoder.set_model(model)
        self._version = version

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p of each token but the first, given those before it, at temperature 1."""
        if self._scratch is not None:  # it is prefilled again afterwards
            self._waiting.appendleft(self._scratch)
            self._scratch, self._scratch_done = None, 0
            self._decoder.drop_scratch()
        logits = self._decoder.score(token_ids)[:-1].float()
        chosen = torch.tensor(token_ids[1:], device=logits.device)[:, None]
        scores: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        return scores

    # -- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                self._read_inbox()
                if not self._paused and (self._waiting or self._running or self._scratch):
                    self._step()
        except Exception:
            # Nothing sensible can be decoded after this; the supervisor starts a new process.
            logger.critical("action=decode_thread_died", exc_info=True)
            os._exit(EXIT_DECODE_FAILED)

    def _read_inbox(self) -> None:
        idle = self._paused or not (self._waiting or self._running or self._scratch)
        if idle and self._dirty and not self._running and self._scratch is None:
            self._decoder.release()
            self._dirty = False
        try:
            self._inbox.get(block=idle)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _step(self) -> None:
        self._dirty = True
        events: list[Event] = []
        self._prefill(events)
        if self._running:
            logits = self._decoder.decode([reply.ids_last for reply in self._running])
            self._sample(logits, 0, events)
        self._deliver(events)

    def _prefill(self, events: list[Event]) -> None:
        """Work off the scratch row, else admit waiting replies; a bounded number of tokens."""
        if self._scratch is None and self._waiting and len(self._running) < self._max_rows:
            if len(self._waiting[0]) > PREFILL_TOKENS:
                self._scratch, self._scratch_done = self._waiting.popleft(), 0
            else:
                self._prefill_group(events)
                return
        if self._scratch is not None:
            self._prefill_scratch(self._scratch, events)

    def _prefill_group(self, events: list[Event]) -> None:
        crowd = len(self._waiting) > len(self._running)
        budget = BURST_TOKENS if crowd else PREFILL_TOKENS
        group: list[Reply] = []
        widest = 0
        while self._waiting and len(self._running) + len(group) < self._max_rows:
            length = len(self._waiting[0])
            widest = max(widest, length)
            if group and (length > PREFILL_TOKENS or widest * (len(group) + 1) > budget):
                break
            group.append(self._waiting.popleft())
        first = len(self._running)
        logits = self._decoder.prefill([reply.ids for reply in group])
        self._running += group
        self._sample(logits, first, events)

    def _prefill_scratch(self, reply: Reply, events: list[Event]) -> None:
        ids = reply.ids
        chunk = ids[self._scratch_done : self._scratch_done + PREFILL_TOKENS]
        logits = self._decoder.prefill_scratch(chunk)
        self._scratch_done += len(chunk)
        if self._scratch_done == len(ids):
            self._decoder.adopt_scratch()
            self._running.append(reply)
            self._scratch, self._scratch_done = None, 0
            self._sample(logits, len(self._running) - 1, events)

    def _sample(self, logits: torch.Tensor, first: int, events: list[Event]) -> None:
        """Draw for the rows from `first` on; drop those that are complete (highest row first)."""
        with torch.inference_mode():
            draws = sampler.draw(logits, self._running[first:])
        for reply, draw in zip(self._running[first:], draws, strict=True):
            events.append((reply, reply.take(draw, self._version)))
        for row in range(len(self._running) - 1, first - 1, -1):
            if self._running[row].finish_reason is not None:
                self._drop(row)

    def _drop(self, row: int) -> None:
        self._decoder.drop(row)
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last

    def _abort(self, chosen: Callable[[Reply], bool]) -> None:
        gone = [reply for reply in self._waiting if chosen(reply)]
        for reply in gone:
            self._waiting.remove(reply)
        if self._scratch is not None and chosen(self._scratch):
            gone.append(self._scratch)
            self._scratch, self._scratch_done = None, 0
            self._decoder.drop_scratch()
        for row in range(len(self._running) - 1, -1, -1):
            if chosen(self._running[row]):
                gone.append(self._running[row])
                self._drop(row)
        self._deliver([(reply, reply.abort()) for reply in gone])

    def _stop(self) -> None:
        self._stopping = True
        left = [*self._running, *self._waiting, *([self._scratch] if self._scratch else [])]
        self._deliver([(reply, EngineUnavailable("the engine stops")) for reply in left])
