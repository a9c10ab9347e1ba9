"""One reply while it is being generated: ids, log-probabilities, text, spans. No torch here."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from online_sao.engines.embedded.detokenize import Detokenizer, Vocabulary
from online_sao.engines.stopping import StopFilter
from online_sao.types import ReplyChunk, Sampling, TokenText, TopLogprob, VersionSpan

Sink = Callable[[ReplyChunk | Exception], None]


@dataclass(frozen=True, slots=True)
class Draw:
    """One sampled token: its log-probability, and the likeliest (id, log-probability) pairs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Reply:
    """One request's state. Owned by the decode thread once submitted."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    eos_ids: frozenset[int]
    vocabulary: Vocabulary
    sink: Sink
    ignore_eos: bool = False
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed (`bad_words`)."""
    reply_ids: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token stands in the reply."""
    rng: random.Random = field(init=False)
    """Its own, so that a seeded reply does not depend on what else is decoded."""
    finish_reason: str | None = None
    _detokenizer: Detokenizer = field(init=False)
    _shown: StopFilter = field(init=False)
    _spans: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.sampling.seed)  # None: from the system's entropy
        self._detokenizer = Detokenizer(self.vocabulary.decode)
        self._shown = StopFilter(self.sampling.stop)

    @property
    def ids(self) -> list[int]:
        """Prompt and reply."""
        return [*self.prompt_ids, *self.reply_ids]

    @property
    def ids_last(self) -> int:
        """The token that the next decoding step feeds."""
        return self.reply_ids[-1]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.reply_ids)

    def may_end(self) -> bool:
        """False while fewer than `min_tokens` tokens stand."""
        return len(self.reply_ids) >= self.sampling.min_tokens

    def take(self, draw: Draw, version: int) -> ReplyChunk:
        """Append a token sampled from `version`; the chunk to send for it."""
        may_end = len(self.reply_ids) + 1 >= self.sampling.min_tokens
        self.reply_ids.append(draw.token_id)
        self.counts[draw.token_id] += 1
        self._extend_span(version)
        text = ""
        if draw.token_id in self.eos_ids and not self.ignore_eos:
            self.finish_reason = "stop"
        else:
            text = self._shown.push(self._detokenizer.push(draw.token_id), check=may_end)
            if self._shown.stopped:
                self.finish_reason = "stop"
            elif len(self.reply_ids) >= self.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None and not self._shown.stopped:
            text += self._shown.finish()
        return self._chunk(text, draw)

    def abort(self) -> ReplyChunk:
        """The last chunk of a reply that the engine gave up."""
        self.finish_reason = "abort"
        return self._last("", (), (), ())

    def _chunk(self, text: str, draw: Draw) -> ReplyChunk:
        token, raw = self.vocabulary.token(draw.token_id)
        top = tuple(TopLogprob(*self._named(other, logprob)) for other, logprob in draw.top)
        tokens = (TokenText(token, raw, top),)
        if self.finish_reason is None:
            return ReplyChunk(text, (draw.token_id,), (draw.logprob,), tokens)
        return self._last(text, (draw.token_id,), (draw.logprob,), tokens)

    def _named(self, token_id: int, logprob: float) -> tuple[str, float, tuple[int, ...]]:
        token, raw = self.vocabulary.token(token_id)
        return token, logprob, raw

    def _last(
        self,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[float],
        tokens: Sequence[TokenText],
    ) -> ReplyChunk:
        return ReplyChunk(
            text=text,
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            tokens=tuple(tokens),
            finish_reason=self.finish_reason,
            version_spans=tuple(VersionSpan(*span) for span in self._spans),
            completion_tokens=len(self.reply_ids),
        )

    def _extend_span(self, version: int) -> None:
        end = len(self.reply_ids)
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._spans[-1][1], end)
        else:
            self._spans.append((version, end - 1, end))
