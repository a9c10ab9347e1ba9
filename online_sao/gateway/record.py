"""What the engine says of one reply, kept as it was said; then the record of how it ended."""

from __future__ import annotations

from dataclasses import replace

from online_sao.types import (
    NotTrainable,
    Outcome,
    RenderedPrompt,
    ReplyChunk,
    RolloutCompletion,
    RolloutRequest,
    VersionSpan,
    token_problem,
    utc_now,
)


class ReplyRecord:
    """The growing record of one reply. Nothing is padded, cut or replaced."""

    def __init__(self, request: RolloutRequest, *, keep_content: bool = True) -> None:
        self.request = request
        self._keep_content = keep_content
        self.prompt_ids: tuple[int, ...] = ()
        self.reply_ids: list[int] = []
        self.finish_reason: str | None = None
        self._texts: list[str] = []
        self._logprobs: list[float] = []
        self._spans: tuple[VersionSpan, ...] = ()
        self._engine_count: int | None = None

    def row(self) -> RolloutRequest:
        """The request as it may be kept."""
        return self.request if self._keep_content else replace(self.request, messages=())

    def set_prompt(self, prompt: RenderedPrompt) -> None:
        """The prompt's ids, as the engine rendered them."""
        self.prompt_ids = prompt.token_ids

    def add(self, chunk: ReplyChunk) -> None:
        """The next chunk."""
        self._texts.append(chunk.text)
        self.reply_ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        if chunk.version_spans:
            self._spans = chunk.version_spans
        if chunk.completion_tokens is not None:
            self._engine_count = chunk.completion_tokens

    @property
    def text(self) -> str:
        """The reply so far."""
        return "".join(self._texts)

    @property
    def completion_tokens(self) -> int:
        """The engine's own count, or else the ids'."""
        return len(self.reply_ids) if self._engine_count is None else self._engine_count

    @property
    def policy_version(self) -> int | None:
        """The version that sampled the last token; None before the engine said."""
        return self._spans[-1].version if self._spans else None

    def not_trainable(self) -> NotTrainable | None:
        """Why a whole reply may not be trained on: the client's wish, the sampling, the tokens."""
        if not self.request.train:
            return NotTrainable.OPT_OUT
        if not self._keep_content:
            return NotTrainable.STORE_FALSE
        of_sampling = self.request.sampling.not_trainable()
        if of_sampling is not None:
            return of_sampling
        if not self.prompt_ids:
            return NotTrainable.NO_TOKEN_IDS
        problem = token_problem(self.reply_ids, self._logprobs, self._spans, self._engine_count)
        return problem[0] if problem is not None else None

    def completion(
        self,
        outcome: Outcome,
        *,
        engine: str,
        not_trainable: NotTrainable | None = None,
        error: str | None = None,
    ) -> RolloutCompletion:
        """The record of how it ended, now. Without content where the client forbade to keep it."""
        keep = self._keep_content
        return RolloutCompletion(
            rollout_id=self.request.id,
            completed_at=utc_now(),
            outcome=outcome,
            text=self.text if keep else "",
            prompt_ids=self.prompt_ids if keep else (),
            reply_ids=tuple(self.reply_ids) if keep else (),
            logprobs=tuple(self._logprobs) if keep else (),
            version_spans=self._spans,
            finish_reason=self.finish_reason,
            not_trainable=not_trainable,
            error=error,
            engine=engine,
        )
