"""The double behind our HTTP face, and what can go wrong with it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_sao.engines import wire
from online_sao.engines.scripted.script import (
    END,
    TURN,
    VOCABULARY,
    Spelling,
    encode,
    make_reply,
    token_shown,
)
from online_sao.engines.stopping import StopFilter
from online_sao.errors import EngineRefused, EngineUnavailable, SwapFailed, VersionFolderError
from online_sao.manifest import Manifest
from online_sao.types import ReplyChunk, Sampling, TokenText, VersionSpan

logger = logging.getLogger(__name__)

SILENCE_POLL_S = 0.1


@dataclass(slots=True)
class Faults:
    """What goes wrong; the defaults are a healthy engine."""

    drop_last_logprob: bool = False
    logprob: float | None = None
    """Reported for the reply's last token instead of its log-probability."""
    die_after: int | None = None
    """Die after so many tokens."""
    stall_after: int | None = None
    """Say nothing more after so many tokens."""
    refuse: str | None = None
    """Answer 400 with this message."""
    unavailable: bool = False
    """Answer 503."""
    swap_error: bool = False
    swap_stall_s: float = 0.0
    """Take so long over an update."""
    swap_ignored: bool = False
    """Say yes to an update and go on with the old weights."""
    probe_offset: float = 0.0
    """Added to each probe token's log-probability."""


@dataclass(frozen=True, slots=True)
class _Served:
    version: int
    sha256: str
    probe_ids: tuple[int, ...] = ()
    probe_logprobs: tuple[float, ...] = ()


class ScriptedBackend:
    """The double behind our HTTP face (`online_sao.engines.server.Backend`)."""

    def __init__(
        self,
        *,
        version: int = 0,
        tokens_per_s: float = 0.0,
        replies: Sequence[str] = (),
        model: str = "online-sao",
        max_model_len: int = 2048,
        silence_s: float = 30.0,
        die: Callable[[], None] | None = None,
    ) -> None:
        self.faults = Faults()
        self.tokens_per_s = tokens_per_s
        self.replies = list(replies)
        """Scripted replies, in turn; empty: made up."""
        self._model, self._max_model_len, self._silence_s = model, max_model_len, silence_s
        self._die = die
        self._boot_id = f"scripted-{uuid.uuid4().hex[:12]}"
        self._served = _Served(version, "0" * 64)
        self._staged: _Served | None = None
        self._previous: _Served | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._heard = time.monotonic()
        self._in_flight: dict[int, str] = {}
        self._aborted: set[str] = set()
        self._turn = 0

    # -- facts -------------------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        """What this engine is and serves."""
        return {
            "boot_id": self._boot_id,
            "version": self._served.version,
            "sha256": self._served.sha256,
            "probe": {
                "token_ids": list(self._served.probe_ids),
                "logprobs": [p + self.faults.probe_offset for p in self._served.probe_logprobs],
            },
            "paused": not self._running.is_set(),
            "model": self._model,
            "max_model_len": self._max_model_len,
            "in_flight": len(self._in_flight),
            "stages": True,
        }

    # -- replies -----------------------------------------------------------------------------

    def render(self, chat: wire.ChatBody) -> list[int]:
        """`<turn>role: content<end>` for each message, then the assistant's turn opened."""
        self._check_faults()
        ids: list[int] = []
        before = None
        for message in chat.messages:
            role, content = message.get("role"), message.get("content")
            if role == before == "user" or (before is None and role == "assistant"):
                raise EngineRefused("roles must alternate, the user first", param="messages")
            before = role
            ids += [TURN, *encode(f"{role}: {content or ''}"), END]
        ids += [TURN, *encode("assistant:")]
        self._check_length(len(ids), "messages")
        return ids

    def check(self, body: wire.GenerateBody) -> None:
        """Raises EngineRefused where a real engine would."""
        self._check_faults()
        sampling = body.sampling_params.to_sampling()
        self._check_length(len(body.token_ids), "token_ids")
        if any(not 0 <= token < VOCABULARY for token, _ in sampling.logit_bias):
            raise EngineRefused(
                f"logit_bias holds a token id outside the vocabulary of {VOCABULARY}",
                param="logit_bias",
            )
        room = self._max_model_len - len(body.token_ids)
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            raise EngineRefused(
                f"max_tokens is {sampling.max_tokens}, but the context of {self._max_model_len} "
                f"tokens leaves {room} after a prompt of {len(body.token_ids)}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    async def generate(self, body: wire.GenerateBody) -> AsyncGenerator[ReplyChunk, None]:
        """One token per chunk at the set rate."""
        sampling = body.sampling_params.to_sampling()
        room = self._max_model_len - len(body.token_ids)
        script = self._script(body.token_ids, sampling)
        limit = min(sampling.max_tokens or room, room, len(script))
        key = self._turn
        self._in_flight[key] = body.request_id
        spans: list[VersionSpan] = []
        text, spelling = StopFilter(sampling.stop), Spelling()
        due = time.monotonic()
        try:
            for n, (token, logprob) in enumerate(script[:limit], start=1):
                due = await self._next_token(n - 1, due)
                if body.request_id in self._aborted:
                    yield _last("", (), (), (), "abort", spans)
                    return
                _extend(spans, self._served.version, n)
                shown = text.push(spelling.push(token))
                finish = "stop" if token == END or text.stopped else None
                if finish is None and n == limit:
                    finish = "length"
                if finish is not None and not text.stopped:
                    shown += text.finish()
                logprobs = self._faulty(logprob) if finish else (logprob,)
                tokens = (token_shown(token, logprob, sampling.top_logprobs),)
                if finish is not None:
                    yield _last(shown, (token,), logprobs, tokens, finish, spans)
                    return
                yield ReplyChunk(shown, (token,), logprobs, tokens)
        finally:
            del self._in_flight[key]
            self._aborted.discard(body.request_id)

    async def score(self, token_ids: list[int]) -> list[float]:
        """Made-up log-probabilities of the prompt's tokens."""
        if tuple(token_ids) == self._served.probe_ids:
            return [p + self.faults.probe_offset for p in self._served.probe_logprobs]
        return [-1.0 - (token % 7) / 7 for token in token_ids[1:]]

    def abort(self, request_ids: list[str]) -> None:
        """End these replies with `abort`."""
        self._aborted |= set(request_ids) & set(self._in_flight.values())

    # -- control -----------------------------------------------------------------------------

    def touch(self) -> None:
        """A controller was heard."""
        self._heard = time.monotonic()

    async def pause(self) -> None:
        """Hold all replies."""
        self._running.clear()

    async def resume(self) -> None:
        """Go on; an update that was not finished is reverted first."""
        await self.revert()
        self._running.set()

    async def stage(self, info: wire.UpdateInfo) -> None:
        """Check the folder's manifest (an empty path has none). Raises SwapFailed."""
        self.touch()
        if self.faults.swap_stall_s:
            await asyncio.sleep(self.faults.swap_stall_s)
        if self.faults.swap_error:
            raise SwapFailed("scripted: the update fails")
        if not info.path:
            self._staged = _Served(info.version, info.sha256)
            return
        try:
            manifest = await asyncio.to_thread(Manifest.read, Path(info.path))
            await asyncio.to_thread(manifest.verify, Path(info.path))
        except VersionFolderError as error:
            raise SwapFailed(str(error)) from error
        if manifest.sha256 != info.sha256:
            raise SwapFailed(f"{info.path} has SHA-256 {manifest.sha256}")
        probes = manifest.probes
        self._staged = _Served(info.version, manifest.sha256, probes.token_ids, probes.logprobs)

    async def update(self, info: wire.UpdateInfo) -> None:
        """Serve it from the next token on."""
        if self._staged is None or self._staged.sha256 != info.sha256:
            await self.stage(info)
        if self._staged is None or self._previous is not None:
            raise SwapFailed("another update is not finished")
        self._previous = self._served
        if not self.faults.swap_ignored:
            self._served = self._staged
        self._staged = None

    async def finish(self, label: str) -> None:
        """Forget the version before."""
        if self._previous is None:
            raise SwapFailed(f"no update to {label[:40]!r} is in place")
        self._previous = None

    async def revert(self) -> None:
        """Back to the version before an unfinished update."""
        self._staged = None
        if self._previous is not None:
            self._served, self._previous = self._previous, None

    async def watch(self) -> None:
        """Go on alone after `silence_s` without a controller; run as a task."""
        while True:
            await asyncio.sleep(SILENCE_POLL_S)
            idle = self._running.is_set() and self._previous is None
            if not idle and time.monotonic() - self._heard > self._silence_s:
                logger.error("action=controller_silent detail=going on with the old version")
                await self.resume()

    # -- inside ------------------------------------------------------------------------------

    def _script(self, prompt: Sequence[int], sampling: Sampling) -> list[tuple[int, float]]:
        self._turn += 1
        scripted = self.replies[self._turn % len(self.replies) - 1] if self.replies else None
        return make_reply(prompt, sampling, turn=self._turn, scripted=scripted)

    async def _next_token(self, done: int, due: float) -> float:
        """Wait for the token's time; the next one's time."""
        if done == self.faults.die_after:
            if self._die is not None:
                self._die()
            raise EngineUnavailable("scripted: the engine dies")
        if done == self.faults.stall_after:
            await asyncio.Event().wait()
        if self.tokens_per_s > 0:
            due += 1 / self.tokens_per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        else:
            await asyncio.sleep(0)
        if not self._running.is_set():
            await self._running.wait()
            due = time.monotonic()
        return due

    def _faulty(self, logprob: float) -> tuple[float, ...]:
        if self.faults.drop_last_logprob:
            return ()
        return (logprob if self.faults.logprob is None else self.faults.logprob,)

    def _check_faults(self) -> None:
        if self.faults.unavailable:
            raise EngineUnavailable("scripted: the engine is not there")
        if self.faults.refuse is not None:
            raise EngineRefused(self.faults.refuse, param="messages")

    def _check_length(self, count: int, param: str) -> None:
        if count >= self._max_model_len:
            raise EngineRefused(
                f"this model's context is {self._max_model_len} tokens, and the prompt is {count} "
                "tokens; a reply needs at least one more",
                param=param,
                code="context_length_exceeded",
            )


def _extend(spans: list[VersionSpan], version: int, end: int) -> None:
    if spans and spans[-1].version == version:
        spans[-1] = VersionSpan(version, spans[-1].start, end)
    else:
        spans.append(VersionSpan(version, end - 1, end))


def _last(
    text: str,
    ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    tokens: tuple[TokenText, ...],
    finish: str,
    spans: Sequence[VersionSpan],
) -> ReplyChunk:
    count = spans[-1].end if spans else 0
    return ReplyChunk(text, ids, logprobs, tokens, finish, tuple(spans), count)
