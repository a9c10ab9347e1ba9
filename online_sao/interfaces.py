"""The seams: one Protocol each, a double we ship, one contract suite run on every implementation.

| seam | ours | the double |
|---|---|---|
| `Engine` | `engines.client` (to a vLLM or an embedded server) | `engines.scripted` |
| `Store` | `store.sql` | `store.memory` |
| `Judge` | `judges.rules`, `judges.feedback` | a class of three lines in the tests |
| `Trainer` | `learner.trainer` | `learner.scripted` |
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from online_sao.types import (
    JSON,
    Alarm,
    Delivery,
    EngineStatus,
    Episode,
    EpisodeRewards,
    Evidence,
    Feedback,
    FeedbackReceipt,
    Judgement,
    Ledger,
    Message,
    NewVersion,
    PolicyVersion,
    RenderedPrompt,
    ReplyChunk,
    RewardStats,
    Rollout,
    RolloutCompletion,
    RolloutRequest,
    RubricVersion,
    Sampling,
    TokenTrace,
    TrainingResult,
    Trajectory,
    Update,
    Verdict,
)


@runtime_checkable
class Engine(Protocol):
    """What serves the policy. The chat template is the engine's, and nobody else's."""

    async def render(
        self, messages: Sequence[Message], *, tools: Sequence[JSON] = ()
    ) -> RenderedPrompt:
        """Token ids of a chat, the assistant's turn opened.

        Raises EngineRefused (the template refuses the chat, or it exceeds the context), or
        EngineUnavailable / EngineTimeout.
        """
        ...

    def generate(
        self, prompt: RenderedPrompt, sampling: Sampling, *, request_id: str
    ) -> AsyncGenerator[ReplyChunk, None]:
        """Sample one reply, chunk by chunk; closing the generator aborts the engine's work.

        Raises EngineRefused before the first chunk, EngineUnavailable / EngineTimeout any time.
        """
        ...

    async def load_version(self, version: PolicyVersion, fallback: PolicyVersion) -> Delivery:
        """Swap to `version` with requests in flight kept, and prove that it arrived.

        On any failure the engine serves `fallback` (what it served before) and goes on;
        raises SwapFailed or WeightsNotDelivered. Never takes longer than its swap time-out.
        """
        ...

    async def status(self) -> EngineStatus:
        """What is served now. Raises EngineUnavailable / EngineTimeout."""
        ...

    async def recover(self) -> None:
        """Resume an engine that some dead controller left paused; nothing otherwise."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


@runtime_checkable
class Judge(Protocol):
    """Scores one reply. Its class is named in the rubric (`module:Class`); no arguments."""

    async def judge(self, evidence: Evidence, rubric: RubricVersion) -> Verdict:
        """The verdict. Raises JudgeError when the judge itself failed; it is tried again."""
        ...

    def check(self, criteria: JSON) -> list[str]:
        """Every problem of a rubric's criteria, in words; empty when it can be used."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """Owns policy, critic and both optimizers. Synchronous; called from one thread."""

    def restore(self, policy: Path, state: Path | None) -> str:
        """Load the policy's weights, and the rest from `state` (None: start afresh).

        Returns a note for the operator ("" when there is nothing to say). Raises ModelError.
        """
        ...

    def update(self, trajectories: Sequence[Trajectory], *, critic_only: bool) -> TrainingResult:
        """One SAO update. Raises UpdateNotFinite with everything as it was before."""
        ...

    def export_policy(self, folder: Path) -> None:
        """Write a servable version with its manifest into the new folder `folder` (no fsync)."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write all of the trainer's state into the new folder `folder` (no fsync)."""
        ...


@runtime_checkable
class Store(Protocol):
    """The database. Each method is one transaction; all raise DatabaseUnavailable.

    Leases have an owner and a deadline; whoever's lease ran out gets LeaseLost on commit.
    """

    async def open(self) -> None:
        """Connect; raises DatabaseRevisionError when the schema is not this code's."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...

    # -- serving ---------------------------------------------------------------------------

    async def insert_rollout(self, request: RolloutRequest) -> None:
        """The request came: state `in_flight`.

        One with an `episode_id` joins that episode: UnknownRecord when there is none, and
        EpisodeClosed when it is closed, with nothing inserted.
        """
        ...

    async def complete_rollout(self, completion: RolloutCompletion) -> None:
        """Record the end, once (VersionConflict the second time).

        `completed` and trainable -> `awaiting_judgement`; not trainable, or `aborted` ->
        `not_trainable` with its reason; `failed` -> `failed` with its error word. A trainable
        reply of an episode waits, with the reason `episode`, until the episode has ended.
        """
        ...

    async def fail_orphans(self, started_before: datetime, error: str) -> int:
        """Rollouts still in flight from a process that died -> `failed`; how many."""
        ...

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """One rollout. Raises UnknownRecord."""
        ...

    async def add_feedback(self, feedback: Feedback) -> FeedbackReceipt:
        """Append; a rollout that waits for it, or is judged but not leased yet, is judged (again).

        Where an episode has one verdict, feedback on any of its replies is on the episode.
        Raises UnknownRecord (no such rollout) and VersionConflict (client id reused for other
        content).
        """
        ...

    async def list_feedback(self, rollout_id: str) -> list[Feedback]:
        """All feedback on a rollout, oldest first."""
        ...

    # -- episodes --------------------------------------------------------------------------

    async def open_episode(self, episode_id: str) -> Episode:
        """Declare a tool episode, which requests may join. VersionConflict if the id is taken."""
        ...

    async def get_episode(self, episode_id: str) -> Episode:
        """One episode with its replies counted. Raises UnknownRecord."""
        ...

    async def close_episode(self, episode_id: str) -> Episode:
        """Nothing joins it any more; closed before, it stays as it is. Raises UnknownRecord.

        Once no request of it is in flight it has ended: as the active rubric's `episodes` says,
        its last trainable reply awaits judgement for all, or each for itself.
        """
        ...

    async def close_idle_episodes(self, idle_s: float) -> int:
        """Close those with no request in flight and none that came or ended for `idle_s`."""
        ...

    # -- judging ---------------------------------------------------------------------------

    async def put_rubric(
        self,
        name: str,
        judge: str,
        criteria: JSON,
        *,
        message: str = "",
        author: str = "",
        episodes: EpisodeRewards = EpisodeRewards.ONE,
    ) -> RubricVersion:
        """Append a version of `name` and activate it; the active one if it is the same."""
        ...

    async def active_rubric(self) -> RubricVersion:
        """The version replies are judged under now. Raises UnknownRecord."""
        ...

    async def claim_unjudged(
        self, owner: str, *, limit: int, lease_s: float
    ) -> list[tuple[Rollout, tuple[Feedback, ...]]]:
        """Lease up to `limit` rollouts that await judgement (their wait over), oldest first.

        One that is judged for its whole episode comes with the feedback on all its replies.
        """
        ...

    async def record_judgement(self, judgement: Judgement, owner: str) -> None:
        """Append it and move the rollout: scored -> judged, unscorable, expired.

        An `error` puts it back to `awaiting_judgement` (use `postpone_judgement` for when). A
        verdict on a whole episode is passed on to its other replies, each with a judgement of
        its own that names the first.
        Raises LeaseLost.
        """
        ...

    async def postpone_judgement(self, rollout_id: str, owner: str, until: datetime) -> None:
        """Give it back; not claimable before `until` unless feedback comes. Raises LeaseLost."""
        ...

    async def list_judgements(self, rollout_id: str) -> list[Judgement]:
        """All judgements of a rollout, oldest first."""
        ...

    async def reward_stats(self, since: datetime | None = None) -> RewardStats:
        """Over all replies scored after `since` (None: ever); an episode of one verdict is one."""
        ...

    # -- learning --------------------------------------------------------------------------

    async def claim_trajectories(
        self,
        owner: str,
        *,
        size: int,
        lease_s: float,
        max_lag: int,
        max_train_tokens: int,
        skip_cut: bool,
    ) -> list[Trajectory]:
        """Lease exactly `size` judged trajectories, oldest first, or none at all.

        A rollout is one trajectory. A tool episode's are leased together or not at all, once
        each of them is settled, as the trajectories that `Trajectory.from_episode` makes of them.
        An episode that would overfill the batch waits; where nothing else can fill it, the batch
        takes the episode and is larger than `size`.

        Those too old, too long, malformed (or cut, with `skip_cut`) are discarded with their
        reason on the way, also when too few remain; what refuses one reply of an episode, or its
        merged sequence, discards all of them.
        """
        ...

    async def renew_lease(self, owner: str, lease_s: float) -> None:
        """Move the deadline of all that `owner` holds. Raises LeaseLost if any was taken."""
        ...

    async def release_leases(self, owner: str) -> int:
        """Give everything `owner` holds back; how many."""
        ...

    async def commit_update(
        self,
        owner: str,
        update: Update,
        new_version: NewVersion | None,
        traces: Sequence[TokenTrace] = (),
    ) -> Update:
        """One transaction: check the lease, mark the rollouts, allocate the number, insert both.

        By the update's kind the rollouts become `trained` (policy), `critic_only` (critic_only,
        skipped) or `discarded` with reason `not_finite`. `new_version` goes with kind policy alone.
        Returns the update with its version's number. Raises LeaseLost with nothing changed.
        """
        ...

    async def count_updates(self) -> int:
        """Updates ever committed, of every kind."""
        ...

    async def list_updates(self, *, limit: int = 100) -> list[Update]:
        """The latest updates, newest first."""
        ...

    async def list_traces(self, rollout_id: str) -> list[TokenTrace]:
        """Per-token training values of a trained rollout (empty after their retention)."""
        ...

    # -- policies --------------------------------------------------------------------------

    async def add_base_version(self, path: str, sha256: str) -> PolicyVersion:
        """Version 0, the starting policy, if there is none yet; state `stable`."""
        ...

    async def get_version(self, number: int) -> PolicyVersion:
        """One version. Raises UnknownRecord."""
        ...

    async def list_versions(self) -> list[PolicyVersion]:
        """All versions, newest first."""
        ...

    async def newest_stable(self) -> PolicyVersion:
        """The newest version that is whole and not withdrawn (stable, live or retired)."""
        ...

    async def live_version(self) -> PolicyVersion | None:
        """What the engine serves, as far as the database knows."""
        ...

    async def mark_live(self, number: int, delivery: JSON) -> None:
        """`number` -> live, the one before -> retired, stable ones older than it -> superseded."""
        ...

    async def unpublished(self) -> int:
        """How many stable versions are newer than the live one."""
        ...

    # -- operation -------------------------------------------------------------------------

    async def ledger(self) -> Ledger:
        """Counts by state and reason, and every identity checked, from one snapshot."""
        ...

    async def recover_leases(self) -> int:
        """Rollouts whose lease ran out -> back to where they were; how many."""
        ...

    async def prune_text(self, before: datetime) -> int:
        """Drop messages, text and token traces of finished rollouts older than `before`."""
        ...

    async def get_note(self, key: str) -> JSON | None:
        """A small named record: control flags, heartbeats, progress."""
        ...

    async def put_note(self, key: str, value: Mapping[str, Any]) -> None:
        """Write a small named record."""
        ...

    async def raise_alarm(self, name: str, message: str) -> None:
        """Open the alarm, or count it once more."""
        ...

    async def clear_alarm(self, name: str) -> None:
        """Close the alarm, if it is open."""
        ...

    async def alarms(self) -> list[Alarm]:
        """The open alarms, oldest first."""
        ...
