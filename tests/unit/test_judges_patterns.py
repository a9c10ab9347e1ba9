"""`judges.patterns`: what `re` finds, and an end to what it would never finish."""

from __future__ import annotations

import re
import time

import pytest

from judges.patterns import MAX_TEXT, find_patterns
from online_sao.errors import JudgeError

TEXT = "One fish, two fish; Ähre, 你好 😀\nred fish"


async def test_it_finds_what_re_finds_here() -> None:
    patterns = [r"fish", r"(?i)^RED", r"(?m)^red", r"\bÄhre\b", "你.", "😀", r"\d", ""]
    expected = [sum(1 for _ in re.finditer(pattern, TEXT)) for pattern in patterns]
    assert expected[:7] == [3, 0, 1, 1, 1, 1, 0]
    assert await find_patterns(patterns, TEXT) == expected


async def test_a_text_with_a_lone_surrogate_is_searched_like_any_other() -> None:
    assert await find_patterns(["b"], "a\ud800b") == [1]


async def test_a_pattern_that_backtracks_for_ages_is_ended_at_the_limit() -> None:
    start = time.perf_counter()
    with pytest.raises(JudgeError, match=r"took longer than 0\.3 s"):
        await find_patterns([r"(a+)+b"], "a" * 64, limit_s=0.3)
    assert time.perf_counter() - start < 3.0


async def test_a_pattern_that_re_refuses_is_a_judge_error() -> None:
    with pytest.raises(JudgeError, match="ended with code 1"):
        await find_patterns(["("], "text")


async def test_a_longer_text_than_allowed_is_refused() -> None:
    assert await find_patterns(["a"], "a" * MAX_TEXT) == [MAX_TEXT]
    with pytest.raises(ValueError, match="20001 characters"):
        await find_patterns(["a"], "a" * (MAX_TEXT + 1))
