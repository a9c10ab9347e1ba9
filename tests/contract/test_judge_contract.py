"""What every judge must keep, run on each shipped rubric, and on a user's own judge."""

from __future__ import annotations

import copy
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from judges.feedback import FeedbackJudge
from judges.rules import RULES, RulesJudge
from online_sao.errors import JudgeError
from online_sao.interfaces import Judge
from online_sao.rubrics import load_judge, load_rubric, shipped_rubrics
from online_sao.types import (
    JSON,
    Evidence,
    Expired,
    Feedback,
    Message,
    RubricVersion,
    Scored,
    Unscorable,
    Verdict,
    Wait,
)

DONE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class LengthJudge:
    """A user's judge: good where the reply is even in length."""

    async def judge(self, evidence: Evidence, rubric: RubricVersion) -> Verdict:
        return Scored(int(len(evidence.reply) % 2 == 0), rubric.criteria["style"], "parity")

    def check(self, criteria: JSON) -> list[str]:
        return [] if isinstance(criteria, dict) and criteria.get("style") in (0, 1) else ["style"]


EVERY_RULE = {
    "quality": {
        "finished": True,
        "min_words": 1,
        "max_words": 30,
        "contains_any": ["a", "e"],
        "max_repetition": 0.5,
        "excludes_pattern": "zz+",
    },
    "style": {
        "contains": "e",
        "excludes": ["x"],
        "style_words": {"words": ["tea", "the"], "at_least": 1},
        "matches": [r"\w"],
    },
}


def _cases() -> list[tuple[str, Judge, JSON]]:
    """(name, judge, criteria) of all that is shipped; waiting judges on both sides of the wait."""
    cases: list[tuple[str, Judge, JSON]] = [
        ("every rule", RulesJudge(), EVERY_RULE),
        ("a user's own", LengthJudge(), {"style": 1}),
    ]
    for name in shipped_rubrics():
        rubric = load_rubric(name)
        cases.append((name, load_judge(rubric.judge), rubric.criteria))
        if rubric.judge == "judges.feedback:FeedbackJudge":
            waiting = FeedbackJudge(clock=lambda: DONE)
            cases.append((f"{name}, waiting", waiting, rubric.criteria))
    return cases


CASES = _cases()
every_judge = pytest.mark.parametrize(
    ("judge", "criteria"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)

REPLIES = (
    "",
    "   ",
    "Tea is the best.",
    "the end " * 40,
    '{"quality": true, "style": true}',
    "```json\n{}\n```",
    "emoji 😀 and a lone surrogate \ud800, NUL \x00",
    "字" * 50,
    "x" * 25_000,
)
FEEDBACK = (
    (),
    (("thumbs", True),),
    (("thumbs", False),),
    (("rating", 4.0), ("comment", "fine")),
    (("thumbs", False), ("comment", "no, wait"), ("thumbs", True)),
)


def make_evidence(reply: str, said: tuple[tuple[str, Any], ...], finish_reason: str) -> Evidence:
    return Evidence(
        rollout_id="chatcmpl-1",
        messages=(Message("user", "Tea or coffee?"),),
        reply=reply,
        reply_tokens=len(reply),
        finish_reason=finish_reason,
        completed_at=DONE,
        feedback_until=DONE + timedelta(seconds=60),
        feedback=tuple(
            Feedback(f"fb_{i}", "chatcmpl-1", DONE + timedelta(seconds=i), metric, value)
            for i, (metric, value) in enumerate(said)
        ),
    )


def make_rubric(criteria: JSON) -> RubricVersion:
    return RubricVersion("rub_1", "test", 1, "module:Class", criteria, DONE)


ALL_EVIDENCE = [
    make_evidence(reply, said, finish)
    for reply in REPLIES
    for said in FEEDBACK
    for finish in ("stop", "length")
]


@every_judge
async def test_a_verdict_is_one_of_four_and_its_reward_is_0_or_1(
    judge: Judge, criteria: JSON
) -> None:
    rubric = make_rubric(criteria)
    for evidence in ALL_EVIDENCE:
        verdict = await judge.judge(evidence, rubric)
        assert isinstance(verdict, Scored | Wait | Unscorable | Expired)
        if isinstance(verdict, Scored):
            assert verdict.reward in (0.0, 1.0)
            assert verdict.reward == verdict.quality * verdict.style
            assert verdict.reason


@every_judge
async def test_the_same_evidence_gets_the_same_verdict_and_nothing_is_changed(
    judge: Judge, criteria: JSON
) -> None:
    rubric = make_rubric(criteria)
    before = copy.deepcopy((ALL_EVIDENCE, rubric))
    first = [await judge.judge(evidence, rubric) for evidence in ALL_EVIDENCE]
    second = [await judge.judge(evidence, rubric) for evidence in reversed(ALL_EVIDENCE)]
    assert first == second[::-1]
    assert (ALL_EVIDENCE, rubric) == before


@every_judge
def test_check_accepts_the_shipped_criteria(judge: Judge, criteria: JSON) -> None:
    assert isinstance(judge, Judge)
    assert judge.check(criteria) == []


NAMES = ["quality", "style", "fallback", "rating_at_least", "words", "at_least", *RULES]
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**9)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["(", "[a", "(?P<x>a)(?P<x>b)", "*", "a{99999999999}", "(?", "\\"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@every_judge
@hypothesis_settings(max_examples=150, deadline=None)
@given(junk=JUNK)
@pytest.mark.filterwarnings("ignore:Possible (nested set|set)")
def test_junk_criteria_are_listed_and_never_raised(judge: Judge, criteria: JSON, junk: Any) -> None:
    problems = judge.check(junk)
    assert all(isinstance(problem, str) and problem for problem in problems)
    assert not isinstance(junk, list | str | int | float | None) or problems


@pytest.mark.parametrize("name", shipped_rubrics())
async def test_a_shipped_judge_refuses_unusable_criteria_instead_of_scoring(name: str) -> None:
    judge = load_judge(load_rubric(name).judge)
    broken = {"quality": {"max_words": "forty"}, "fallback": {"quality": {"max_words": "forty"}}}
    assert judge.check(broken)
    with pytest.raises(JudgeError):
        await judge.judge(ALL_EVIDENCE[0], make_rubric(broken))


async def test_the_readme_s_judge_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(__file__).parents[2] / "judges" / "README.md").read_text()
    section = readme.split("## A judge in twenty lines")[1]
    code = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 20
    (tmp_path / "tone.py").write_text(code)
    (tmp_path / "ahoy.toml").write_text(
        'name = "ahoy"\njudge = "tone:ToneJudge"\n[criteria]\ngreeting = "Ahoy"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)

    read = load_rubric(tmp_path / "ahoy.toml")
    judge = load_judge(read.judge)
    assert (read.name, read.criteria) == ("ahoy", {"greeting": "Ahoy"})
    assert judge.check({}) == ["greeting must be a text that is not empty"]
    rubric = make_rubric(read.criteria)
    rewards = {}
    for reply in ("Ahoy, friend!", "Hello.", "AHOY!"):
        verdict = await judge.judge(make_evidence(reply, (), "stop"), rubric)
        assert isinstance(verdict, Scored)
        rewards[reply] = verdict.reward
    assert rewards == {"Ahoy, friend!": 1.0, "Hello.": 0.0, "AHOY!": 0.0}
    assert await judge.judge(make_evidence(" ", (), "stop"), rubric) == Unscorable(
        "the reply is empty"
    )


def test_the_readme_names_every_rule_and_every_shipped_rubric() -> None:
    readme = (Path(__file__).parents[2] / "judges" / "README.md").read_text()
    assert [name for name in [*RULES, *shipped_rubrics()] if f"`{name}`" not in readme] == []
