"""One trainer on several ranks: rank 0's calls are orders that every rank carries out.

An error that all ranks meet is an answer like any other (a batch that gives NaN is seen by all of
them, since all of them see the whole batch's numbers). An error that some meet and others do not
leaves the ranks in different places: then the process ends, and with it the learner, which is
started again and goes on from what was committed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from online_sao.errors import OnlineSaoError
from online_sao.interfaces import Trainer
from online_sao.learner.ranks import Ranks
from online_sao.types import TrainingResult, Trajectory

logger = logging.getLogger(__name__)

DISMISSED = "dismissed"
WRITES = ("export_policy", "save_state")
"""Rank 0 alone writes, after all ranks have done their part: an error of its own is an answer."""


class CrewTrainer:
    """`Trainer` on rank 0, for all ranks."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks

    def restore(self, policy: Path, state: Path | None) -> str:
        """See `Trainer.restore`."""
        note: str = self._order("restore", policy, state)
        return note

    def update(self, trajectories: Sequence[Trajectory], *, critic_only: bool) -> TrainingResult:
        """See `Trainer.update`."""
        result: TrainingResult = self._order("update", trajectories, critic_only=critic_only)
        return result

    def export_policy(self, folder: Path) -> None:
        """See `Trainer.export_policy`; written by rank 0 alone."""
        self._order("export_policy", folder)

    def save_state(self, folder: Path) -> None:
        """See `Trainer.save_state`; written by rank 0 alone."""
        self._order("save_state", folder)

    def dismiss(self) -> None:
        """Send the other ranks home."""
        self._ranks.order((DISMISSED, (), {}))

    def _order(self, name: str, *args: Any, **kwargs: Any) -> Any:
        order = (name, args, kwargs)
        return _carry_out(self._trainer, self._ranks, self._ranks.order(order))


def follow(trainer: Trainer, ranks: Ranks) -> None:
    """Do what rank 0 orders, until it dismisses us."""
    while True:
        order = ranks.order()
        if order[0] == DISMISSED:
            return
        try:
            _carry_out(trainer, ranks, order)
        except OnlineSaoError as error:  # rank 0 has it too, and decides
            logger.info("action=order_failed order=%s error=%s", order[0], error)


def _carry_out(trainer: Trainer, ranks: Ranks, order: tuple[str, Any, Any]) -> Any:
    """The order's answer. Raises the error that every rank met, or rank 0 in writing; ends the
    process over any other.
    """
    name, args, kwargs = order
    answer, failure = None, None
    try:
        answer = getattr(trainer, name)(*args, **kwargs)
    except (OnlineSaoError, OSError) as error:
        failure = error
    # The boundary of a rank: whatever it is, the others wait for us, and must not wait for ever.
    except BaseException as error:  # noqa: BLE001
        _end(ranks, name, error)
    first, *others = ranks.all_say("" if failure is None else type(failure).__name__)
    written_alone = name in WRITES and set(others) == {""}
    if not written_alone and set(others) != {first}:
        _end(ranks, name, failure)
    if failure is not None:
        raise failure
    return answer


def _end(ranks: Ranks, name: str, error: BaseException | None) -> NoReturn:
    logger.critical(
        "action=rank_failed rank=%d order=%s error=%r", ranks.rank, name, error,
        exc_info=error,
    )  # fmt: skip
    os._exit(1)  # no clean-up: it would wait for the ranks that wait for us
