"""One chat from its row to its end. The row comes first; it is completed once, whatever happens."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from online_sao.errors import (
    DatabaseUnavailable,
    EngineError,
    EngineUnavailable,
    EpisodeClosed,
    StoreError,
    UnknownRecord,
    VersionConflict,
)
from online_sao.gateway.episodes import closed_episode, unknown_episode
from online_sao.gateway.later import uninterrupted
from online_sao.gateway.problems import ApiError, error_word, from_below
from online_sao.gateway.record import ReplyRecord
from online_sao.gateway.services import Services
from online_sao.types import (
    NotTrainable,
    Outcome,
    RenderedPrompt,
    ReplyChunk,
    RolloutCompletion,
    Sampling,
)

logger = logging.getLogger(__name__)

_LATE_DELAYS_S = (0.2, 1.0, 5.0, 15.0, 30.0, 60.0)


class ClientLeft(Exception):
    """Raised by a sink: there is nobody to send to."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What the client is told with the end of a reply."""

    finish_reason: str
    policy_version: int | None
    not_trainable: NotTrainable | None
    prompt_tokens: int
    completion_tokens: int


class Sink(Protocol):
    """Where a reply goes: an event stream, or one JSON object."""

    async def chunk(self, chunk: ReplyChunk) -> None:
        """The next part of the reply."""
        ...

    async def end(self, ending: Ending) -> None:
        """The reply is whole and its record durable."""
        ...

    async def fail(self, problem: ApiError) -> None:
        """There will be no (more of the) reply."""
        ...


class Turn:
    """Runs one chat into a sink. Cancel `run` to end it; say before whether the client left."""

    def __init__(self, services: Services, record: ReplyRecord) -> None:
        self.record = record
        self.client_left = False
        self._services = services
        self._began = time.monotonic()
        self._has_row = False
        self._closed = False

    async def run(self, sink: Sink) -> None:
        """The whole turn. Errors of the engine and the database go to the sink."""
        try:
            async with asyncio.timeout(self._services.settings.service.request_timeout_s):
                await self._generate(await self._open(), sink)
            await self._complete(sink)
        except asyncio.CancelledError:
            await self._close_cancelled()
            raise
        except ClientLeft:
            self.client_left = True
            await self._close_cancelled()
        except (EngineError, StoreError, TimeoutError) as error:
            logger.warning(
                "action=chat_failed id=%s error=%s", self.record.request.id, error or "timeout"
            )
            problem = from_below(error)
            await self._close(Outcome.FAILED, error=error_word(error), status=problem.status_code)
            await sink.fail(problem)
        except ApiError as problem:
            await self._close(Outcome.FAILED, error=problem.code, status=problem.status_code)
            await sink.fail(problem)
        finally:
            await self._close(Outcome.FAILED, error="internal_error")

    async def _open(self) -> RenderedPrompt:
        """Insert the row and render the prompt, side by side; nothing is generated before both."""
        insert = asyncio.ensure_future(self._insert())
        try:
            return await self._render()
        finally:
            try:
                await uninterrupted(insert)
            finally:
                self._has_row = insert.exception() is None

    async def _insert(self) -> None:
        """The row. Raises ApiError 404 or 409 where there is no open episode of that id."""
        row = self.record.row()
        try:
            await self._services.store.insert_rollout(row)
        except UnknownRecord:
            raise unknown_episode(row.episode_id or "") from None
        except EpisodeClosed:
            raise closed_episode(row.episode_id or "") from None

    async def _render(self) -> RenderedPrompt:
        """The prompt's ids, with room for the reply. Raises ApiError or EngineError."""
        status = await self._services.probe.recent()
        prompt = await self._services.engine.render(self.record.request.messages)
        self.record.set_prompt(prompt)
        length = len(prompt.token_ids)
        context = status.max_model_len or self._services.settings.policy.max_model_len
        wanted = self.record.request.sampling.max_tokens
        if length >= context:
            raise _too_long(
                "messages",
                f"`messages` are {length} tokens, and the context of {context} tokens "
                "must hold the reply too.",
            )
        if wanted is not None and length + wanted > context:
            raise _too_long(
                "max_tokens",
                f"`max_tokens` is {wanted}; with the {length} tokens of `messages` that exceeds "
                f"the context of {context} tokens.",
            )
        return prompt

    async def _generate(self, prompt: RenderedPrompt, sink: Sink) -> None:
        request, record = self.record.request, self.record
        began = self._began
        sampling = self._bounded(request.sampling, prompt)
        reply = self._services.engine.generate(prompt, sampling, request_id=request.id)
        async with aclosing(reply):
            async for chunk in reply:
                if began and chunk.token_ids:
                    self._services.metrics.first_token.observe(time.monotonic() - began)
                    began = 0.0
                record.add(chunk)
                await sink.chunk(chunk)
        if record.finish_reason not in ("stop", "length", "abort"):
            raise EngineUnavailable("the engine's reply ended without a finish reason")

    def _bounded(self, sampling: Sampling, prompt: RenderedPrompt) -> Sampling:
        """The sampling with the service's own bound, where the client named none."""
        policy = self._services.settings.policy
        if sampling.max_tokens is not None or policy.default_max_tokens == 0:
            return sampling
        room = policy.max_model_len - len(prompt.token_ids)
        return replace(sampling, max_tokens=max(1, min(policy.default_max_tokens, room)))

    async def _complete(self, sink: Sink) -> None:
        """A reply that is whole, or one that the engine gave up: close the row, tell the client."""
        record = self.record
        if record.finish_reason == "abort" or record.finish_reason is None:
            await self._close(Outcome.ABORTED, not_trainable=NotTrainable.ENGINE_ABORT)
            await sink.fail(from_below(EngineUnavailable("aborted")))
            return
        reason = record.not_trainable()
        await self._close(Outcome.COMPLETED, not_trainable=reason)
        await sink.end(
            Ending(
                finish_reason=record.finish_reason,
                policy_version=record.policy_version,
                not_trainable=reason,
                prompt_tokens=len(record.prompt_ids),
                completion_tokens=record.completion_tokens,
            )
        )

    async def _close_cancelled(self) -> None:
        if self.client_left:
            await self._close(Outcome.ABORTED, not_trainable=NotTrainable.CLIENT_DISCONNECTED)
        else:
            await self._close(Outcome.FAILED, error="shutdown")

    async def _close(
        self,
        outcome: Outcome,
        *,
        not_trainable: NotTrainable | None = None,
        error: str | None = None,
        status: int = 500,
    ) -> None:
        """Complete the row and count the turn; once, the first call counts."""
        if self._closed:
            return
        self._closed = True
        self._count(outcome, not_trainable, status)
        if not self._has_row:
            return
        completion = self.record.completion(
            outcome,
            engine=self._services.probe.boot_id,
            not_trainable=not_trainable,
            error=error,
        )
        if await uninterrupted(self._store_completion(completion)):
            return
        if not self._services.later.add(
            completion.rollout_id, lambda: self._store_completion(completion), _LATE_DELAYS_S
        ):
            self._services.metrics.late_dropped.inc()
            logger.error("action=completion_lost id=%s error=too many wait", completion.rollout_id)

    async def _store_completion(self, completion: RolloutCompletion) -> bool:
        """Write the record; False when the database cannot be reached now."""
        try:
            await self._services.store.complete_rollout(completion)
        except DatabaseUnavailable as error:
            logger.warning("action=completion_late id=%s error=%s", completion.rollout_id, error)
            return False
        except (VersionConflict, UnknownRecord) as error:
            logger.error("action=completion_lost id=%s error=%s", completion.rollout_id, error)
        return True

    def _count(self, outcome: Outcome, not_trainable: NotTrainable | None, status: int) -> None:
        metrics, record = self._services.metrics, self.record
        word = "refused" if outcome is Outcome.FAILED and status < 500 else outcome.value
        seconds = time.monotonic() - self._began
        metrics.chats.labels(word).inc()
        metrics.tokens.labels("prompt").inc(len(record.prompt_ids))
        metrics.tokens.labels("reply").inc(len(record.reply_ids))
        if outcome is Outcome.COMPLETED:
            metrics.reply.observe(seconds)
        if not_trainable is not None:
            metrics.not_trainable.labels(not_trainable.value).inc()
        logger.info(
            "action=chat_ended id=%s outcome=%s trainable=%s tokens=%d seconds=%.3f",
            record.request.id,
            word,
            not_trainable or "yes",
            len(record.reply_ids),
            seconds,
        )


def _too_long(param: str, message: str) -> ApiError:
    return ApiError(400, "context_length_exceeded", message, param=param)
