"""Orders to all ranks: the same answer everywhere, or the end of the process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from online_sao.errors import LearnerError, ModelError, UpdateNotFinite
from online_sao.interfaces import Trainer
from online_sao.learner.crew import DISMISSED, CrewTrainer, follow
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.scripted import ScriptedTrainer
from online_sao.types import Trajectory

ONE = Trajectory(("r",), (1, 2), (False, True), (float("nan"), -1.0), 1.0, 1.0)


class Ended(BaseException):
    """The process would be gone."""


class TwoRanks:
    """Ranks as one of two sees them; the other says what it is told to."""

    rank, size, first = 0, 2, True

    def __init__(self, other: Sequence[str] = (), orders: Sequence[Any] = ()) -> None:
        self.other, self.orders, self.heard = list(other), list(orders), list[Any]()

    def order(self, order: Any = None) -> Any:
        self.heard.append(order)
        return order if order is not None else self.orders.pop(0)

    def all_say(self, word: Any) -> list[Any]:
        return [word, self.other.pop(0) if self.other else word]


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", leave)


def crew(ranks: TwoRanks, trainer: ScriptedTrainer | None = None) -> CrewTrainer:
    return CrewTrainer(trainer or ScriptedTrainer(), cast(Ranks, ranks))


def test_it_is_a_trainer_and_each_call_is_an_order(tmp_path: Path) -> None:
    ScriptedTrainer().export_policy(tmp_path / "base")
    ranks = TwoRanks()
    trainer = crew(ranks)
    assert isinstance(trainer, Trainer)
    assert trainer.restore(tmp_path / "base", None) == ""
    assert trainer.update([ONE], critic_only=False).metrics["trajectories"] == 1.0
    trainer.export_policy(tmp_path / "v1")
    trainer.save_state(tmp_path / "s1")
    trainer.dismiss()
    names = [order[0] for order in ranks.heard]
    assert names == ["restore", "update", "export_policy", "save_state", DISMISSED]
    assert (tmp_path / "v1" / "manifest.json").exists()


def test_an_error_that_all_ranks_met_is_an_answer() -> None:
    failing = ScriptedTrainer(faults={"update": [UpdateNotFinite("loss is nan")]})
    with pytest.raises(UpdateNotFinite, match="loss is nan"):
        crew(TwoRanks(["UpdateNotFinite"]), failing).update([ONE], critic_only=False)


@pytest.mark.parametrize("other", ["", "ModelError"])
def test_an_error_that_the_other_did_not_meet_ends_the_process(other: str) -> None:
    failing = ScriptedTrainer(faults={"update": [UpdateNotFinite("loss is nan")]})
    with pytest.raises(Ended):
        crew(TwoRanks([other]), failing).update([ONE], critic_only=False)


def test_the_other_s_error_ends_this_process_too(tmp_path: Path) -> None:
    with pytest.raises(Ended):
        crew(TwoRanks(["LearnerError"])).save_state(tmp_path / "s")


def test_whatever_else_goes_wrong_ends_the_process_at_once() -> None:
    failing = ScriptedTrainer(faults={"update": [RuntimeError("out of memory")]})
    ranks = TwoRanks()
    with pytest.raises(Ended):
        crew(ranks, failing).update([ONE], critic_only=False)


def test_a_follower_does_as_it_is_told_until_it_is_dismissed(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    trainer = ScriptedTrainer()
    ranks = TwoRanks(
        ["ModelError", ""],
        [
            ("restore", (missing, None), {}),  # an error that rank 0 has too: it goes on
            ("update", ([ONE],), {"critic_only": True}),
            (DISMISSED, (), {}),
            ("update", ([ONE],), {"critic_only": True}),
        ],
    )
    follow(trainer, cast(Ranks, ranks))
    assert trainer.trained == [("r",)]
    assert len(ranks.orders) == 1
    with pytest.raises(ModelError):
        trainer.restore(missing, None)


def test_alone_nothing_is_said() -> None:
    assert ALONE.first
    assert ALONE.order(3) == 3
    assert ALONE.all_say("a") == ["a"]
    assert Ranks.join({}) == ALONE == Ranks.join({"WORLD_SIZE": "1"})


@pytest.mark.parametrize("error", [LearnerError("is the disk full?"), OSError(28, "no space")])
def test_what_rank_0_alone_could_not_write_is_an_answer(tmp_path: Path, error: Exception) -> None:
    """All ranks have done their part by then, so they stand in the same place."""
    failing = ScriptedTrainer(faults={"save": [error]})
    with pytest.raises(type(error)):
        crew(TwoRanks([""]), failing).save_state(tmp_path / "s")
    with pytest.raises(Ended):
        crew(TwoRanks(["ModelError"]), ScriptedTrainer(faults={"save": [error]})).save_state(
            tmp_path / "t"
        )
