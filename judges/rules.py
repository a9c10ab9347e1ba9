"""A judge that measures: length, finished, texts, patterns, style words, repetition.

    reward = quality x style, each 1 where every rule of its table holds

Criteria: two tables, `quality` and `style`, of rules by name; a missing or empty table is 1.
Every rule is described in `judges/README.md`. No model, no network; the same reply always gets
the same verdict.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from judges.patterns import MAX_TEXT, find_patterns
from online_sao.errors import JudgeError
from online_sao.types import JSON, Evidence, RubricVersion, Scored, Unscorable

TABLES = ("quality", "style")
NGRAM = 3
"""Words per n-gram of `max_repetition`."""

_SEPARATORS = re.compile(r"[\s/|\u2013\u2014\u2026]+")
_CHARACTER_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
"""Kana and Han: written without spaces, so each character counts as a word."""


class RulesJudge:
    """Scores a reply by the rules of its rubric alone. An empty reply has quality 0."""

    async def judge(self, evidence: Evidence, rubric: RubricVersion) -> Scored | Unscorable:
        """The verdict; its reason names the first rule that failed, with the measured number.

        Raises JudgeError when the criteria are not usable, or a pattern takes too long.
        """
        return await apply_rules(evidence, rubric.criteria)

    def check(self, criteria: JSON) -> list[str]:
        """Every problem of the criteria, in words."""
        return check_rules(criteria)


async def apply_rules(evidence: Evidence, criteria: JSON) -> Scored | Unscorable:
    """The verdict of a criteria table on one reply. Raises JudgeError."""
    problems = check_rules(criteria)
    if problems:
        raise JudgeError(f"the rubric's criteria cannot be used: {'; '.join(problems)}")
    reply = _Reply(
        text=unicodedata.normalize("NFC", evidence.reply), finish_reason=evidence.finish_reason
    )
    failures = {name: _first_failure(reply, criteria.get(name, {})) for name in TABLES}
    if not reply.text.strip():
        failures["quality"] = "the reply is empty"
    for name in TABLES:
        patterns = _patterns_of(criteria.get(name, {}))
        if failures[name] is not None or not patterns:
            continue
        if len(reply.text) > MAX_TEXT:
            return Unscorable(
                f"{name}: {len(reply.text)} characters; patterns are run on at most {MAX_TEXT}"
            )
        failures[name] = await _pattern_failure(reply, patterns)
    broken = [f"{name}: {failure}" for name, failure in failures.items() if failure is not None]
    return Scored(
        quality=int(failures["quality"] is None),
        style=int(failures["style"] is None),
        reason="; ".join(broken) or f"every rule holds ({_count(len(reply.words), 'word')})",
    )


def check_rules(criteria: object) -> list[str]:
    """Every problem of a criteria table, in words; empty when it can be used."""
    if not isinstance(criteria, Mapping):
        return ["criteria must be a table with `quality` and `style`"]
    problems = [
        f"unknown table `{name}`: there are {', '.join(TABLES)}"
        for name in criteria
        if name not in TABLES
    ]
    for name in TABLES:
        table = criteria.get(name, {})
        if not isinstance(table, Mapping):
            problems.append(f"`{name}` must be a table of rules")
            continue
        problems += [f"{name}.{problem}" for problem in _table_problems(table)]
    return problems


def words(text: str) -> tuple[str, ...]:
    """The words of a text, NFC and case-folded, without the punctuation around them.

    Words stand between white space, dashes and slashes and hold a letter or a digit: "don't",
    "well-known" and "3.5" are one each, "-" is none. A Han or kana character is one.
    """
    spaced = _CHARACTER_WORDS.sub(r" \g<0> ", unicodedata.normalize("NFC", text.casefold()))
    return tuple(word for piece in _SEPARATORS.split(spaced) if (word := _bare(piece)))


def repetition(reply_words: tuple[str, ...]) -> float:
    """The share of the word 3-grams that occurred before in the reply: 1 - distinct / all.

    0 where there are fewer than 3 words.
    """
    total = len(reply_words) - NGRAM + 1
    if total < 1:
        return 0.0
    return 1 - len({reply_words[i : i + NGRAM] for i in range(total)}) / total


@dataclass(frozen=True)
class _Reply:
    """What the rules look at. Words and folded text are made once, when first asked for."""

    text: str
    finish_reason: str | None

    @cached_property
    def words(self) -> tuple[str, ...]:
        return words(self.text)

    @cached_property
    def folded(self) -> str:
        return _fold(self.text)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule: what is wrong with its parameter, and what a reply breaks (None: nothing)."""

    problem: Callable[[Any], str | None]
    failure: Callable[[_Reply, Any], str | None]


def _finished(reply: _Reply, _: bool) -> str | None:
    if reply.finish_reason == "stop":
        return None
    return f"not finished (finish_reason {reply.finish_reason})"


def _min_words(reply: _Reply, bound: int) -> str | None:
    n = len(reply.words)
    return None if n >= bound else f"{_count(n, 'word')}, at least {bound} required"


def _max_words(reply: _Reply, bound: int) -> str | None:
    n = len(reply.words)
    return None if n <= bound else f"{_count(n, 'word')}, at most {bound} allowed"


def _contains(reply: _Reply, texts: str | list[str]) -> str | None:
    wanted = _as_list(texts)
    missing = [text for text in wanted if _fold(text) not in reply.folded]
    if not missing:
        return None
    return f"{len(missing)} of {_count(len(wanted), 'required text')} missing: {missing[0]!r}"


def _contains_any(reply: _Reply, texts: str | list[str]) -> str | None:
    wanted = _as_list(texts)
    if any(_fold(text) in reply.folded for text in wanted):
        return None
    return f"0 of {_count(len(wanted), 'text')} found, at least 1 required"


def _excludes(reply: _Reply, texts: str | list[str]) -> str | None:
    for text in _as_list(texts):
        n = reply.folded.count(_fold(text))
        if n:
            return f"{text!r} occurs {_count(n, 'time')}, none allowed"
    return None


def _style_words(reply: _Reply, rule: Mapping[str, Any]) -> str | None:
    # Spaces around both sides make a substring search a search for whole words, in order.
    spoken = f" {' '.join(reply.words)} "
    n = sum(f" {' '.join(words(entry))} " in spoken for entry in rule["words"])
    if n >= rule["at_least"]:
        return None
    return f"{_count(n, 'different listed word')}, at least {rule['at_least']} required"


def _max_repetition(reply: _Reply, bound: float) -> str | None:
    share = repetition(reply.words)
    if share <= bound:
        return None
    return f"{share:.2f} of its {NGRAM}-grams repeat, at most {bound:.2f} allowed"


def _true_problem(value: object) -> str | None:
    return None if value is True else "must be true (leave the rule out otherwise)"


def _bound_problem(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return f"must be a whole number, 0 or more, not {_show(value)}"
    return None


def _share_problem(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return f"must be a number from 0 to 1, not {_show(value)}"
    return None


def _texts_problem(value: object) -> str | None:
    entries = _as_list(value)
    if not entries or not all(isinstance(entry, str) and entry for entry in entries):
        return f"must be a text or a list of texts, none empty, not {_show(value)}"
    return None


def _patterns_problem(value: object) -> str | None:
    problem = _texts_problem(value)
    if problem is not None:
        return problem
    for pattern in _as_list(value):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            return f"{_show(pattern)} is not a regular expression: {error}"
    return None


def _style_words_problem(value: object) -> str | None:
    if not isinstance(value, Mapping) or set(value) != {"words", "at_least"}:
        return f"must be a table of `words` and `at_least`, not {_show(value)}"
    problem = _bound_problem(value["at_least"])
    if problem is not None:
        return f"at_least {problem}"
    entries = value["words"]
    if not isinstance(entries, list | tuple) or not entries:
        return f"words must be a list of words, not {_show(entries)}"
    for entry in entries:
        if not isinstance(entry, str) or not words(entry):
            return f"words: {_show(entry)} holds no letter or digit (see `contains`)"
    if len({words(entry) for entry in entries}) < len(entries):
        return "words: one stands there twice"
    if value["at_least"] > len(entries):
        return f"at_least is {value['at_least']}, and there are {_count(len(entries), 'word')}"
    return None


def _no_failure(_: _Reply, __: Any) -> None:
    """Patterns are run after all other rules, in a process of their own."""


RULES: dict[str, _Rule] = {
    "finished": _Rule(_true_problem, _finished),
    "min_words": _Rule(_bound_problem, _min_words),
    "max_words": _Rule(_bound_problem, _max_words),
    "contains": _Rule(_texts_problem, _contains),
    "contains_any": _Rule(_texts_problem, _contains_any),
    "excludes": _Rule(_texts_problem, _excludes),
    "style_words": _Rule(_style_words_problem, _style_words),
    "max_repetition": _Rule(_share_problem, _max_repetition),
    "matches": _Rule(_patterns_problem, _no_failure),
    "excludes_pattern": _Rule(_patterns_problem, _no_failure),
}
"""Every rule, in the order in which they are tried (a database may reorder a table's keys)."""


def _table_problems(table: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, value in table.items():
        rule = RULES.get(name)
        if rule is None:
            problems.append(f"{name}: unknown rule; there are {', '.join(RULES)}")
        elif (problem := rule.problem(value)) is not None:
            problems.append(f"{name} {problem}")
    if not problems and table.get("min_words", 0) > table.get("max_words", float("inf")):
        problems.append(
            f"min_words is {table['min_words']}, more than max_words, {table['max_words']}"
        )
    return problems


def _first_failure(reply: _Reply, table: Mapping[str, Any]) -> str | None:
    for name, rule in RULES.items():
        if name in table and (failure := rule.failure(reply, table[name])) is not None:
            return failure
    return None


def _patterns_of(table: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(pattern, whether it must be found)."""
    wanted = [(pattern, True) for pattern in _as_list(table.get("matches", []))]
    return wanted + [(pattern, False) for pattern in _as_list(table.get("excludes_pattern", []))]


async def _pattern_failure(reply: _Reply, patterns: list[tuple[str, bool]]) -> str | None:
    found = await find_patterns([pattern for pattern, _ in patterns], reply.text)
    for (pattern, wanted), n in zip(patterns, found, strict=True):
        if wanted and n == 0:
            return f"pattern {pattern!r} found 0 times, at least 1 required"
        if not wanted and n > 0:
            return f"pattern {pattern!r} found {_count(n, 'time')}, none allowed"
    return None


def _bare(piece: str) -> str:
    """`piece` from its first letter, digit or mark to its last; "" if it has none."""
    start, end = 0, len(piece)
    while start < end and unicodedata.category(piece[start])[0] not in "LNM":
        start += 1
    while end > start and unicodedata.category(piece[end - 1])[0] not in "LNM":
        end -= 1
    return piece[start:end]


def _fold(text: str) -> str:
    return unicodedata.normalize("NFC", text.casefold())


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _show(value: object) -> str:
    """A value for a message, never at length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
