"""What flows: immutable records, standard library only.

    request -> Rollout -> Judgement -> Trajectory -> Update -> PolicyVersion

A record is what happened; a new fact is a new record. Where a rollout stands is not part of
it: that is the ledger's business (`LedgerState`). Times are aware datetimes in UTC.
"""

from __future__ import annotations

import math
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any

from online_sao.errors import RolloutRefused, TrajectoryRefused

JSON = Mapping[str, Any]

LOGPROB_FLOOR = -9999.0
"""Engines write this for "no probability"; at or below it a log-probability is not a number."""


def utc_now() -> datetime:
    """The present, in UTC, with its time zone."""
    return datetime.now(UTC)


def new_uuid7() -> uuid.UUID:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random bits; sorts by time."""
    ms = time.time_ns() // 1_000_000
    value = (ms << 80) | secrets.randbits(80)
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    return uuid.UUID(int=value)


def uuid7_time(value: uuid.UUID) -> datetime:
    """When a UUIDv7 was made (millisecond resolution)."""
    if value.version != 7:
        raise ValueError(f"{value} is not a UUIDv7")
    return datetime.fromtimestamp((value.int >> 80) / 1000, UTC)


def new_id(prefix: str) -> str:
    """A public id: `prefix` + UUIDv7, as in `chatcmpl-0198...` or `fb_0198...`."""
    return f"{prefix}{new_uuid7()}"


def parse_id(public_id: str, prefix: str) -> uuid.UUID:
    """The UUIDv7 inside a public id; ValueError if it is not one of ours."""
    if not public_id.startswith(prefix):
        raise ValueError(f"an id of this kind starts with {prefix!r}")
    value = uuid.UUID(public_id.removeprefix(prefix))
    if value.version != 7:
        raise ValueError("not a UUIDv7")
    return value


ROLLOUT_PREFIX = "chatcmpl-"
EPISODE_PREFIX = "ep_"
FEEDBACK_PREFIX = "fb_"
JUDGEMENT_PREFIX = "jdg_"
RUBRIC_PREFIX = "rub_"
UPDATE_PREFIX = "upd_"


class LedgerState(StrEnum):
    """Where a rollout stands. Each request is in exactly one of these at every moment."""

    IN_FLIGHT = "in_flight"
    """The request came; its reply is not complete."""
    FAILED = "failed"
    """No reply was given."""
    NOT_TRAINABLE = "not_trainable"
    """Served; its record may not be trained on (the reason says why)."""
    AWAITING_JUDGEMENT = "awaiting_judgement"
    """Served and trainable; no judge has it yet, or it waits for the user's thumb."""
    IN_JUDGEMENT = "in_judgement"
    """A judging worker holds its lease."""
    UNSCORABLE = "unscorable"
    """The judge looked and could not score it."""
    EXPIRED = "expired"
    """No verdict came in time (a thumb that was never given, say)."""
    JUDGED = "judged"
    """It has a reward and waits for the learner."""
    LEASED = "leased"
    """The learner holds its lease."""
    CRITIC_ONLY = "critic_only"
    """It trained the critic (warm-up, pretraining) and not the policy."""
    TRAINED = "trained"
    """One update of the policy used it; no other ever will."""
    DISCARDED = "discarded"
    """Judged, and then not used (stale, too long, ...)."""
    DELETED = "deleted"
    """Its content was deleted; the count stays."""


class NotTrainable(StrEnum):
    """Why a served reply is not trainable: one list, shown everywhere."""

    OPT_OUT = "opt_out"
    STORE_FALSE = "store_false"
    KEY_POLICY = "key_policy"
    GREEDY = "greedy"
    TRUNCATED_SAMPLING = "truncated_sampling"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    GRAMMAR = "grammar"
    PINNED_VERSION = "pinned_version"
    NO_TOKEN_IDS = "no_token_ids"
    LOGPROB_MISSING = "logprob_missing"
    LOGPROB_NONFINITE = "logprob_nonfinite"
    CLIENT_DISCONNECTED = "client_disconnected"
    ENGINE_ABORT = "engine_abort"
    LENGTH_TRUNCATED = "length_truncated"
    SIDE_TURN = "side_turn"
    MIXED_VERSIONS_TOO_OLD = "mixed_versions_too_old"
    REDACTED = "redacted"
    QUARANTINED = "quarantined"


class DiscardReason(StrEnum):
    """Why a judged rollout was never trained on."""

    STALE = "stale"
    """Its oldest weights lie more than `max_lag` published versions back."""
    TOO_LONG = "too_long"
    """Prompt and reply together exceed `max_train_tokens`."""
    CUT = "cut"
    """Cut at max_tokens, and `cut_replies` is `skip`."""
    NOT_FINITE = "not_finite"
    """Its batch gave NaN or inf; the update was skipped."""
    MALFORMED = "malformed"
    """Its stored record makes no trajectory: lengths that differ, a number that is not finite."""


class EpisodeRewards(StrEnum):
    """Who of a tool episode's replies is judged: a rubric's choice, fixed when the episode ends."""

    ONE = "one"
    """The last trainable reply; its verdict is the whole episode's."""
    EACH = "each"
    """Every reply on its own."""


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    """The client left, or the engine gave up, before the reply was whole."""
    FAILED = "failed"


class JudgementState(StrEnum):
    """What became of one judge's look at one rollout; only `scored` carries a reward."""

    SCORED = "scored"
    UNSCORABLE = "unscorable"
    ERROR = "error"
    EXPIRED = "expired"


class VersionState(StrEnum):
    """Where a policy version stands."""

    STABLE = "stable"
    """The row exists and its folder is whole; not served yet."""
    LIVE = "live"
    """The engine serves it."""
    RETIRED = "retired"
    """It was live once."""
    SUPERSEDED = "superseded"
    """A newer one was published first; never served."""
    WITHDRAWN = "withdrawn"
    """Taken back; never served again."""


class UpdateKind(StrEnum):
    """What an update did."""

    POLICY = "policy"
    """Policy and critic; made a new version."""
    CRITIC_ONLY = "critic_only"
    """Value pretraining or warm-up; the policy did not move."""
    SKIPPED = "skipped"
    """Nothing pulled on the policy (all advantages 0, no KL, no entropy); the critic trained."""
    NOT_FINITE = "not_finite"
    """A loss or gradient was NaN or inf; nothing changed at all."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `content` is None only where `tool_calls` say what was done."""

    role: str
    content: str | None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[JSON, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a reply is sampled. The defaults change nothing of the policy's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    max_tokens: int | None = None
    """None: up to the context length."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    """Alternatives per token for the client; the sampled token's own is always recorded."""

    def not_trainable(self) -> NotTrainable | None:
        """Why a reply sampled so has log-probabilities of another distribution, if it has."""
        if self.temperature == 0.0:
            return NotTrainable.GREEDY
        if self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0:
            return NotTrainable.TRUNCATED_SAMPLING
        if (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1):
            return NotTrainable.PENALTIES
        if self.logit_bias:
            return NotTrainable.LOGIT_BIAS
        if self.min_tokens > 0 or self.bad_words or self.allowed_token_ids:
            return NotTrainable.GRAMMAR
        return None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a reply were sampled from policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """What is known of a rollout when its request comes; inserted before generation."""

    id: str
    """`chatcmpl-` + UUIDv7; also the reply's public id."""
    created_at: datetime
    messages: tuple[Message, ...]
    sampling: Sampling
    session_id: str
    user_hash: str | None = None
    stream: bool = False
    train: bool = True
    """False: the client opted out."""
    episode_id: str | None = None
    """The tool episode it was declared to belong to."""


@dataclass(frozen=True, slots=True)
class RolloutCompletion:
    """How a rollout ended; recorded once.

    `reply_ids`, `logprobs` and `version_spans` stand as the engine reported them. Where
    `not_trainable` is None they were checked: one length, every log-probability finite, above
    -9999 and at most 0, spans that cover the reply without a gap. Raises `RolloutRefused`
    otherwise; use `token_problem` first to find the reason.
    """

    rollout_id: str
    completed_at: datetime
    outcome: Outcome
    text: str = ""
    prompt_ids: tuple[int, ...] = ()
    reply_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of each sampled token, natural logarithm, temperature applied."""
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: str | None = None
    """`stop`, `length`, `abort`; None when the request failed."""
    not_trainable: NotTrainable | None = None
    error: str | None = None
    """A short machine word (`engine_unavailable`, ...) where the outcome is `failed`."""
    engine: str = ""
    """The engine's boot id."""

    def __post_init__(self) -> None:
        if self.outcome is Outcome.COMPLETED and self.not_trainable is None:
            if not self.prompt_ids:
                raise RolloutRefused(NotTrainable.NO_TOKEN_IDS, "the prompt has no token ids")
            problem = token_problem(self.reply_ids, self.logprobs, self.version_spans)
            if problem is not None:
                raise RolloutRefused(*problem)


def token_problem(
    reply_ids: Sequence[int],
    logprobs: Sequence[float],
    version_spans: Sequence[VersionSpan],
    completion_tokens: int | None = None,
) -> tuple[NotTrainable, str] | None:
    """The first thing that forbids training on these tokens, or None.

    `completion_tokens` is the engine's own count, where it gave one. Nothing is ever padded,
    cut or replaced to make a record fit.
    """
    n = len(reply_ids)
    if n == 0 or (completion_tokens is not None and completion_tokens != n):
        return NotTrainable.NO_TOKEN_IDS, f"{n} token ids for {completion_tokens} tokens"
    if len(logprobs) != n:
        return NotTrainable.LOGPROB_MISSING, f"{len(logprobs)} log-probabilities for {n} tokens"
    for t, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob <= LOGPROB_FLOOR or logprob > 0.0:
            return NotTrainable.LOGPROB_NONFINITE, f"{logprob} at token {t}"
    end = 0
    for span in version_spans:
        if span.start != end or span.end <= span.start:
            return NotTrainable.NO_TOKEN_IDS, "version spans do not cover the reply"
        end = span.end
    if end != n:
        return NotTrainable.NO_TOKEN_IDS, "version spans do not cover the reply"
    return None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One served reply, as it happened, with where it stands now."""

    request: RolloutRequest
    completion: RolloutCompletion | None
    state: LedgerState
    reason: str | None = None
    """A `NotTrainable`, `DiscardReason` or error word, by state."""

    @property
    def id(self) -> str:
        """The reply's public id."""
        return self.request.id


@dataclass(frozen=True, slots=True)
class Episode:
    """A declared tool episode: replies that are judged, claimed and trained together.

    It has ended once it is closed and none of its requests is in flight.
    """

    id: str
    """`ep_` + UUIDv7."""
    created_at: datetime
    last_active_at: datetime
    """When a request last joined it, or a reply of it was last completed."""
    closed_at: datetime | None = None
    rewards: EpisodeRewards | None = None
    """Who is judged; None until it has ended."""
    counts: Mapping[LedgerState, int] = field(default_factory=dict)
    """Its replies by where they stand; states without any are left out."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a user said of one reply. Append-only; the latest by a user on a metric counts."""

    id: str
    rollout_id: str
    created_at: datetime
    metric: str
    """`thumbs` (bool), `rating` (number) or `comment` (text)."""
    value: bool | float | str
    comment: str | None = None
    user_hash: str | None = None
    source: str = "api"
    client_id: str | None = None
    """The client's own id of it, for idempotency."""


class FeedbackReceipt(StrEnum):
    """What became of a feedback."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The same client id with the same content: one row."""
    ALREADY_TRAINED = "already_trained"
    """Kept; the reply has been trained on, and never is again."""


@dataclass(frozen=True, slots=True)
class RubricVersion:
    """One numbered, immutable version of what replies are rewarded for."""

    id: str
    name: str
    number: int
    judge: str
    """`module:Class` of the judge."""
    criteria: JSON
    """The judge's own parameters, plain JSON."""
    created_at: datetime
    message: str = ""
    author: str = ""
    episodes: EpisodeRewards = EpisodeRewards.ONE
    """Who is judged in a tool episode."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a judge may look at: one rollout and what its user said of it.

    Where one reply is judged for its whole tool episode, `messages` hold the conversation up to
    that reply, and `feedback` what was said of any of the episode's replies.
    """

    rollout_id: str
    messages: tuple[Message, ...]
    reply: str
    reply_tokens: int
    finish_reason: str | None
    completed_at: datetime
    feedback_until: datetime
    """Until when a judge that wants the user's feedback should wait for it."""
    feedback: tuple[Feedback, ...] = ()
    """Oldest first; superseded ones included."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A verdict: reward = quality x style, both 0 or 1."""

    quality: int
    style: int
    reason: str

    def __post_init__(self) -> None:
        if self.quality not in (0, 1) or self.style not in (0, 1):
            raise ValueError("quality and style are 0 or 1")

    @property
    def reward(self) -> float:
        """quality x style."""
        return float(self.quality * self.style)


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet: ask again at `until` (or as soon as feedback comes)."""

    until: datetime


@dataclass(frozen=True, slots=True)
class Unscorable:
    """The judge looked and cannot score this reply. Not a reward of 0."""

    reason: str


@dataclass(frozen=True, slots=True)
class Expired:
    """What the judge waited for did not come in time. Not a reward of 0."""

    reason: str


Verdict = Scored | Wait | Unscorable | Expired


@dataclass(frozen=True, slots=True)
class Judgement:
    """One judge's look at one rollout under one rubric version."""

    id: str
    rollout_id: str
    created_at: datetime
    rubric_id: str
    judge: str
    state: JudgementState
    quality: int | None = None
    style: int | None = None
    reward: float | None = None
    """None in every state but `scored`."""
    reason: str = ""
    latency_s: float = 0.0
    attempts: int = 1

    def __post_init__(self) -> None:
        if (self.state is JudgementState.SCORED) != (self.reward is not None):
            raise ValueError("a reward belongs to a scored judgement, and to no other")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A rollout and its reward as the learner sees it: one token sequence.

    `token_ids`, `action_mask` and `logprobs` have one length T; `logprobs` is NaN off the mask.
    A tool episode whose prompts extend each other is one trajectory of several rollouts. What no
    update could take is refused at birth: TrajectoryRefused.
    """

    rollout_ids: tuple[str, ...]
    """In the order of their tokens."""
    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    reward: float
    temperature: float
    lag: int = 0
    """Published versions since the oldest weights in its spans."""
    cut: bool = False
    """It (or a reply of its episode) ended at max_tokens."""
    reward_at: tuple[tuple[int, float], ...] = ()
    """(token, reward), where each reply of an episode has its own; `reward` is then their sum.
    Empty: `reward` stands on the last action token."""

    def __post_init__(self) -> None:
        n, m, k = len(self.token_ids), len(self.action_mask), len(self.logprobs)
        if not n == m == k:
            raise TrajectoryRefused(
                f"{self._name}: {n} token ids, {m} mask entries and {k} log-probabilities "
                "must have one length"
            )
        if not any(self.action_mask):
            raise TrajectoryRefused(f"{self._name} has no action token")
        if self.action_mask[0]:
            raise TrajectoryRefused(f"{self._name} does not start with a prompt token")
        for t, (action, logprob) in enumerate(zip(self.action_mask, self.logprobs, strict=True)):
            if action and not math.isfinite(logprob):
                raise TrajectoryRefused(f"{self._name}: log-probability {logprob} at token {t}")
        self._check_rewards()

    def _check_rewards(self) -> None:
        for t, reward in ((-1, self.reward), *self.reward_at):
            if not math.isfinite(reward):
                raise TrajectoryRefused(f"{self._name}: its reward is {reward}")
            if t >= 0 and not (t < len(self.action_mask) and self.action_mask[t]):
                raise TrajectoryRefused(f"{self._name}: a reward on token {t}, which is no action")
        if self.reward_at and math.fsum(r for _, r in self.reward_at) != self.reward:
            raise TrajectoryRefused(f"{self._name}: its reward is not the sum of its replies'")

    @property
    def _name(self) -> str:
        return self.rollout_ids[0] if self.rollout_ids else "a trajectory"

    @property
    def placed_rewards(self) -> tuple[tuple[int, float], ...]:
        """(token, reward) of every reward: `reward_at`, or `reward` on the last action token."""
        if self.reward_at:
            return self.reward_at
        return ((len(self.action_mask) - 1 - self.action_mask[::-1].index(True), self.reward),)

    @classmethod
    def from_rollout(
        cls, request: RolloutRequest, completion: RolloutCompletion, reward: float, lag: int
    ) -> Trajectory:
        """The one-reply trajectory: the prompt masked, the reply's tokens the actions."""
        p, n = len(completion.prompt_ids), len(completion.reply_ids)
        return cls(
            rollout_ids=(request.id,),
            token_ids=completion.prompt_ids + completion.reply_ids,
            action_mask=(False,) * p + (True,) * n,
            logprobs=(math.nan,) * p + completion.logprobs,
            reward=reward,
            temperature=request.sampling.temperature,
            lag=lag,
            cut=completion.finish_reason == "length",
        )

    @classmethod
    def from_episode(
        cls, members: Sequence[Trajectory | None], rewards: EpisodeRewards
    ) -> list[Trajectory]:
        """The trajectories of an episode from its replies', in their order: one, or each its own.

        None stands for a reply that may not be trained on. They become one where every prompt's
        ids extend the ids before it exactly, the temperature is the same, and no None stands
        between two of them. With `one`, each member carries the episode's reward, and the merged
        trajectory carries it once, on its last action token.
        """
        replies = [member for member in members if member is not None]
        if len(replies) < 2 or not _is_chain(members):
            return replies
        last, first = replies[-1], replies[0]
        mask, logprobs = first.action_mask, first.logprobs
        for reply in replies[1:]:
            mask += reply.action_mask[len(mask) :]
            logprobs += reply.logprobs[len(logprobs) :]
        each = rewards is EpisodeRewards.EACH
        placed = tuple(at for reply in replies for at in reply.placed_rewards)
        return [
            cls(
                rollout_ids=tuple(i for reply in replies for i in reply.rollout_ids),
                token_ids=last.token_ids,
                action_mask=mask,
                logprobs=logprobs,
                reward=math.fsum(r for _, r in placed) if each else last.reward,
                temperature=first.temperature,
                lag=max(reply.lag for reply in replies),
                cut=any(reply.cut for reply in replies),
                reward_at=placed if each else (),
            )
        ]


def _is_chain(members: Sequence[Trajectory | None]) -> bool:
    """Whether each reply's prompt begins with all the ids up to the end of the reply before."""
    present = [i for i, member in enumerate(members) if member is not None]
    chain = members[present[0] : present[-1] + 1]
    for before, after in pairwise(chain):
        if before is None or after is None or before.temperature != after.temperature:
            return False
        n = len(before.token_ids)
        if after.action_mask.index(True) < n or after.token_ids[:n] != before.token_ids:
            return False
    return True


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """What an update saw at each action token of one trajectory (one length, in order)."""

    rollout_id: str
    """The trajectory's first rollout: of a merged episode it owns the trace of all the replies."""
    values: tuple[float, ...]
    """V(s_t), before the update."""
    advantages: tuple[float, ...]
    ratios: tuple[float, ...]
    """r_t, equation 2."""
    kept: tuple[bool, ...]
    """False where equation 3 masked the token."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What one trainer step did."""

    kind: UpdateKind
    metrics: Mapping[str, float | None]
    traces: tuple[TokenTrace, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A whole, fsynced weights folder that has no number yet."""

    path: str
    sha256: str
    parent: int


@dataclass(frozen=True, slots=True)
class Update:
    """One learner step, as committed."""

    id: str
    created_at: datetime
    kind: UpdateKind
    rollout_ids: tuple[str, ...]
    metrics: Mapping[str, float | None]
    version: int | None = None
    """The version it made, if it made one."""
    note: str = ""
    """What an operator should know of it (resumed from an older state, skipped why)."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """Weights that can be served."""

    number: int
    parent: int | None
    path: str
    """Folder of config, tokenizer, safetensors and manifest.json."""
    sha256: str
    state: VersionState
    created_at: datetime
    gate: str = "passed"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A chat as the engine's own template turned it into token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at one position."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenText:
    """A sampled token as a client sees it, with its alternatives."""

    token: str
    bytes: tuple[int, ...] | None = None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyChunk:
    """Some tokens of a reply. `text` may lag behind `token_ids` (half a character, a stop string).

    The last chunk carries `finish_reason`, the spans over the whole reply and the engine's count.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: tuple[TokenText, ...] = ()
    """The same tokens in text, one per id."""
    finish_reason: str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine says of itself."""

    boot_id: str
    """New with every start of the engine's process."""
    version: int | None
    """Policy version served; None when it carries no number of ours."""
    paused: bool
    model: str
    max_model_len: int
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """Proof that a version arrived: what the engine read and computes, not what it was told."""

    version: int
    sha256: str
    probe_error: float
    """Largest |difference| of a probe token's log-probability, against the manifest (nats)."""
    paused_s: float
    """Seconds in which the engine did not decode."""
    total_s: float


@dataclass(frozen=True, slots=True)
class ProbeTokens:
    """A stored prompt and the log-probability of each of its tokens but the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator must know. One row per name while it lasts."""

    name: str
    message: str
    since: datetime
    count: int = 1


@dataclass(frozen=True, slots=True)
class Ledger:
    """How many rollouts stand where, and whether it adds up."""

    requests: int
    """Requests ever accepted, counted on their own."""
    counts: Mapping[LedgerState, int]
    reasons: Mapping[LedgerState, Mapping[str, int]]
    problems: tuple[str, ...] = field(default=())
    """Each broken identity, in words; empty when all is well."""

    @property
    def adds_up(self) -> bool:
        """True when every identity of the ledger holds."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Rewards of the replies judged in a span of time."""

    count: int
    mean: float | None
