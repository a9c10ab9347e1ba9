"""`judges.rules`: each rule at its bound, on texts whose numbers are counted by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from judges.patterns import find_patterns
from judges.rules import RULES, RulesJudge, apply_rules, check_rules, repetition, words
from online_sao.errors import JudgeError
from online_sao.types import Evidence, RubricVersion, Scored, Unscorable

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def evidence(reply: str, finish_reason: str = "stop") -> Evidence:
    return Evidence(
        rollout_id="chatcmpl-1",
        messages=(),
        reply=reply,
        reply_tokens=len(reply.split()),
        finish_reason=finish_reason,
        completed_at=NOW,
        feedback_until=NOW,
    )


async def scored(reply: str, finish_reason: str = "stop", **tables: dict[str, Any]) -> Scored:
    verdict = await apply_rules(evidence(reply, finish_reason), tables)
    assert isinstance(verdict, Scored)
    return verdict


async def test_a_reply_that_keeps_every_rule_earns_one_and_is_measured() -> None:
    verdict = await scored("One two three.", quality={"finished": True, "max_words": 3})
    assert (verdict.quality, verdict.style, verdict.reward) == (1, 1, 1.0)
    assert verdict.reason == "every rule holds (3 words)"


async def test_57_words_against_at_most_40_is_named_with_both_numbers() -> None:
    verdict = await scored("word " * 57, quality={"max_words": 40})
    assert (verdict.quality, verdict.style) == (0, 1)
    assert verdict.reason == "quality: 57 words, at most 40 allowed"


@pytest.mark.parametrize(
    ("rule", "holds", "fails", "measured"),
    [
        ({"min_words": 3}, "one two three", "one two", "2 words, at least 3 required"),
        ({"max_words": 2}, "one two", "one two three", "3 words, at most 2 allowed"),
        (
            {"contains": ["tea", "Milk"]},
            "TEA with milk",
            "tea alone",
            "1 of 2 required texts missing: 'Milk'",
        ),
        (
            {"contains_any": ["tea", "milk"]},
            "some milk",
            "some water",
            "0 of 2 texts found, at least 1 required",
        ),
        (
            {"excludes": "as an ai"},
            "a sane reply",
            "As an AI, as an AI",
            "'as an ai' occurs 2 times, none allowed",
        ),
        (
            {"style_words": {"words": ["thou", "hast", "dear reader"], "at_least": 2}},
            "Thou art here, dear reader!",
            "Thou thou thou, dear old reader",
            "1 different listed word, at least 2 required",
        ),
        (
            # "a b c", "b c a", "c a b", "a b c": 3 distinct of 4.
            {"max_repetition": 0.25},
            "a b c a b c",
            "a b c a b c a",
            "0.40 of its 3-grams repeat, at most 0.25 allowed",
        ),
        (
            {"matches": [r"^\d+\.", "end$"]},
            "1. the end",
            "1. the end.",
            "pattern 'end$' found 0 times, at least 1 required",
        ),
        (
            {"excludes_pattern": r"(?i)\bsorry\b"},
            "sorrysome",
            "Sorry, so sorry",
            "pattern '(?i)\\\\bsorry\\\\b' found 2 times, none allowed",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_each_rule_holds_at_its_bound_and_says_by_how_much_it_fails(
    rule: dict[str, Any], holds: str, fails: str, measured: str
) -> None:
    assert check_rules({"quality": rule}) == []
    assert (await scored(holds, quality=rule)).quality == 1
    broken = await scored(fails, quality=rule)
    assert (broken.quality, broken.style) == (0, 1)
    assert broken.reason == f"quality: {measured}"
    in_style = await scored(fails, style=rule)
    assert (in_style.quality, in_style.style) == (1, 0)
    assert in_style.reason == f"style: {measured}"


async def test_a_reply_cut_at_its_limit_is_not_finished() -> None:
    verdict = await scored("One two", "length", quality={"finished": True})
    assert verdict.quality == 0
    assert verdict.reason == "quality: not finished (finish_reason length)"


@pytest.mark.parametrize("reply", ["", " \n\t"])
async def test_an_empty_reply_has_quality_0_under_every_rubric(reply: str) -> None:
    verdict = await scored(reply)
    assert (verdict.quality, verdict.style) == (0, 1)
    assert verdict.reason == "quality: the reply is empty"


async def test_the_first_broken_rule_is_named_whatever_order_the_table_has() -> None:
    rules = {"max_words": 1, "finished": True}
    for table in (rules, dict(reversed(rules.items()))):
        verdict = await scored("one two", "length", quality=table)
        assert verdict.reason == "quality: not finished (finish_reason length)"


async def test_both_tables_are_judged_on_their_own() -> None:
    verdict = await scored("one two", quality={"max_words": 1}, style={"contains": "ahoy"})
    assert (verdict.quality, verdict.style) == (0, 0)
    assert verdict.reason == (
        "quality: 2 words, at most 1 allowed; style: 1 of 1 required text missing: 'ahoy'"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I don't know - really.", ("i", "don't", "know", "really")),
        ("well-known, 3.5 kg (dry)", ("well-known", "3.5", "kg", "dry")),
        ("yes/no—maybe…", ("yes", "no", "maybe")),
        ("STRASSE Straße", ("strasse", "strasse")),
        ("cafe\u0301 CAFÉ", ("café", "café")),
        ("हिन्दी की", ("हिन्दी", "की")),
        ("你好, world", ("你", "好", "world")),
        ("*** ... 😀 !!", ()),
    ],
)
def test_words_are_counted_in_any_script(text: str, expected: tuple[str, ...]) -> None:
    assert words(text) == expected


async def test_style_words_are_whole_words_in_any_case_and_script() -> None:
    rule = {"style_words": {"words": ["Über", "可爱", "art"], "at_least": 2}}
    assert check_rules({"style": rule}) == []
    assert (await scored("ÜBER all: 很可爱的", style=rule)).style == 1
    assert (await scored("artful überall 可以爱", style=rule)).style == 0


@pytest.mark.parametrize(
    ("text", "share"), [("", 0.0), ("a a", 0.0), ("a a a a", 0.5), ("a b c d", 0.0)]
)
def test_repetition_is_the_share_of_3_grams_seen_before(text: str, share: float) -> None:
    assert repetition(words(text)) == pytest.approx(share)


async def test_a_pattern_that_would_run_for_hours_is_a_failed_judge_and_not_a_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("judges.rules.find_patterns", partial(find_patterns, limit_s=0.5))
    with pytest.raises(JudgeError, match=r"patterns took longer than 0\.5 s"):
        await scored("a" * 64, quality={"matches": "(a+)+b"})


async def test_a_reply_too_long_for_patterns_is_unscorable_unless_another_rule_fails() -> None:
    long = "word " * 5000
    criteria = {"quality": {"matches": "x", "max_words": 6000}}
    verdict = await RulesJudge().judge(evidence(long), _rubric(criteria))
    assert verdict == Unscorable("quality: 25000 characters; patterns are run on at most 20000")
    failed = await scored(long, quality={"matches": "x", "max_words": 40})
    assert failed.reason == "quality: 5000 words, at most 40 allowed"


async def test_criteria_that_cannot_be_used_are_a_judge_error_and_not_a_reward() -> None:
    with pytest.raises(JudgeError, match="unknown rule"):
        await RulesJudge().judge(evidence("hello"), _rubric({"quality": {"max_wrods": 40}}))


@pytest.mark.parametrize(
    ("criteria", "problem"),
    [
        ([], "criteria must be a table with `quality` and `style`"),
        ({"tone": {}}, "unknown table `tone`: there are quality, style"),
        ({"quality": 3}, "`quality` must be a table of rules"),
        (
            {"quality": {"shorter": 3}},
            f"quality.shorter: unknown rule; there are {', '.join(RULES)}",
        ),
        (
            {"quality": {"finished": False}},
            "quality.finished must be true (leave the rule out otherwise)",
        ),
        (
            {"quality": {"min_words": -1}},
            "quality.min_words must be a whole number, 0 or more, not -1",
        ),
        (
            {"quality": {"max_words": True}},
            "quality.max_words must be a whole number, 0 or more, not True",
        ),
        (
            {"quality": {"min_words": 5, "max_words": 4}},
            "quality.min_words is 5, more than max_words, 4",
        ),
        (
            {"style": {"contains": ["a", ""]}},
            "style.contains must be a text or a list of texts, none empty, not ['a', '']",
        ),
        (
            {"style": {"max_repetition": 1.5}},
            "style.max_repetition must be a number from 0 to 1, not 1.5",
        ),
        (
            {"style": {"matches": "(a"}},
            "style.matches '(a' is not a regular expression: "
            "missing ), unterminated subpattern at position 0",
        ),
        (
            {"style": {"style_words": ["a"]}},
            "style.style_words must be a table of `words` and `at_least`, not ['a']",
        ),
        (
            {"style": {"style_words": {"words": ["a"], "at_least": 2}}},
            "style.style_words at_least is 2, and there are 1 word",
        ),
        (
            {"style": {"style_words": {"words": ["a", "A"], "at_least": 1}}},
            "style.style_words words: one stands there twice",
        ),
        (
            {"style": {"style_words": {"words": ["~"], "at_least": 1}}},
            "style.style_words words: '~' holds no letter or digit (see `contains`)",
        ),
    ],
)
def test_check_names_the_rule_and_what_is_wrong_with_it(criteria: Any, problem: str) -> None:
    assert check_rules(criteria) == [problem]


def test_check_lists_every_problem_at_once() -> None:
    criteria = {"quality": {"min_words": "x", "matches": "["}, "style": 1, "extra": {}}
    assert len(check_rules(criteria)) == 4


def _rubric(criteria: dict[str, Any]) -> RubricVersion:
    return RubricVersion(
        id="rub_1",
        name="test",
        number=1,
        judge="judges.rules:RulesJudge",
        criteria=criteria,
        created_at=NOW,
    )
