"""Rubric files and judges by name: what is wrong with one is said in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from online_sao.errors import ConfigError
from online_sao.interfaces import Judge
from online_sao.rubrics import RubricFile, load_judge, load_rubric, read_rubric, shipped_rubrics
from online_sao.types import EpisodeRewards

GOOD = """
name = "mine"
judge = "judges.rules:RulesJudge"
message = "why"
[criteria.quality]
max_words = 7
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_the_shipped_rubrics_are_these_and_each_can_be_loaded() -> None:
    assert shipped_rubrics() == ["brief", "thumb_or_rules", "thumbs"]
    assert [load_rubric(name).name for name in shipped_rubrics()] == shipped_rubrics()


def test_brief_rewards_a_finished_answer_of_at_most_40_words() -> None:
    assert load_rubric("brief") == RubricFile(
        "brief",
        "judges.rules:RulesJudge",
        {"quality": {"finished": True, "max_words": 40}},
        "a finished answer of at most 40 words",
    )


def test_the_default_asks_for_a_thumb_and_falls_back_to_rules() -> None:
    rubric = load_rubric("thumb_or_rules")
    assert (rubric.name, rubric.judge) == ("thumb_or_rules", "judges.feedback:FeedbackJudge")
    quality = rubric.criteria["fallback"]["quality"]
    assert (quality["finished"], quality["min_words"], quality["max_words"]) == (True, 3, 80)
    assert 0 < quality["max_repetition"] < 1


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    criteria = {"quality": {"max_words": 7}}
    want = RubricFile("mine", "judges.rules:RulesJudge", criteria, "why")
    assert read_rubric(path) == load_rubric(str(path)) == want
    assert want.episodes is EpisodeRewards.ONE


def test_a_rubric_may_want_each_reply_of_an_episode_judged(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace('message = "why"', 'episodes = "each"'))
    assert load_rubric(path).episodes is EpisodeRewards.EACH


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "mine.toml is not valid TOML: Invalid value"),
        ('episodes = "some"', "`episodes` must be one of one, each"),
        ("episodes = 1", "`episodes` must be one of one, each"),
        ('name = "mine"', "`judge` must be a text that is not empty"),
        ('name = 3\njudge = "a:B"', "`name` must be a text that is not empty"),
        (
            f"colour = 1{GOOD}",
            "unknown key `colour` (there are name, judge, message, ",
        ),
        ('name = "m"\njudge = "a:B"\nmessage = 1', "`message` must be a text"),
        ('name = "m"\njudge = "a:B"\ncriteria = 1', "`criteria` must be a table"),
        (f"{GOOD}since = 2026-01-01", "`criteria` holds what JSON cannot"),
        (f"{GOOD}share = nan", "`criteria` holds what JSON cannot"),
    ],
)
def test_a_bad_file_is_refused_naming_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_rubric(write(tmp_path, text))
    assert message in str(error.value)
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_rubric(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.toml cannot be read"):
        read_rubric(tmp_path / "bytes.toml")


@pytest.mark.parametrize("name", ["breif", "", "../rules"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    expected = "cannot be read" if "/" in name else "shipped: brief, thumb_or_rules, thumbs"
    with pytest.raises(ConfigError, match=expected):
        load_rubric(name)


def test_every_problem_that_the_judge_finds_is_listed(tmp_path: Path) -> None:
    bad = GOOD.replace("max_words = 7", 'max_wrods = 7\nmatches = "("')
    with pytest.raises(ConfigError, match=r"rubric mine: .*unknown rule.*; .*not a regular"):
        load_rubric(write(tmp_path, bad))


def test_a_judge_is_made_from_its_name() -> None:
    assert isinstance(load_judge("judges.rules:RulesJudge"), Judge)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("judges.rules", "'judges.rules' is not of the form `module:Class`"),
        (":RulesJudge", "is not of the form"),
        ("no_such_module:Judge", "there is no module no_such_module"),
        ("judges.rules:NoJudge", "module 'judges.rules' has no attribute 'NoJudge'"),
        ("datetime:datetime", "cannot be made: TypeError"),
        ("collections:OrderedDict", "lacks `judge` or `check`"),
    ],
)
def test_a_judge_that_cannot_be_made_is_refused_saying_why(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_judge(name)
    assert message in str(error.value)


def test_a_judge_whose_module_breaks_at_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_judge.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be made: ZeroDivisionError"):
        load_judge("broken_judge:Judge")
