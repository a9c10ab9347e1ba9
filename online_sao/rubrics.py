"""Rubric files, and the judges they name: TOML in, a judge that accepts its criteria out.

Judges are imported by their dotted names alone: ours enter by the same door as a user's.
"""

from __future__ import annotations

import importlib
import importlib.resources
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from online_sao.errors import ConfigError
from online_sao.interfaces import Judge
from online_sao.types import JSON, EpisodeRewards

_SHIPPED = "judges"
_RUBRIC_KEYS = ("name", "judge", "message", "episodes", "criteria")


@dataclass(frozen=True, slots=True)
class RubricFile:
    """A rubric as its TOML file gives it: well-formed; its judge has not seen it yet."""

    name: str
    judge: str
    """`module:Class`."""
    criteria: JSON
    message: str = ""
    episodes: EpisodeRewards = EpisodeRewards.ONE
    """Who is judged in a tool episode: its last reply for all, or each for itself."""


def shipped_rubrics() -> list[str]:
    """The names of the rubrics that come with the package."""
    folder = importlib.resources.files(_SHIPPED) / "rubrics"
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml"))


def read_rubric(name_or_path: str | Path) -> RubricFile:
    """A rubric by its shipped name or its file's path (ends in .toml or has a folder in it).

    Raises ConfigError: no such name or file, not TOML, an unknown, missing or mistyped key.
    """
    where, text = _rubric_text(str(name_or_path))
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None
    problems = [
        f"unknown key `{key}` (there are {', '.join(_RUBRIC_KEYS)})"
        for key in table
        if key not in _RUBRIC_KEYS
    ]
    problems += [
        f"`{key}` must be a text that is not empty"
        for key in ("name", "judge")
        if not isinstance(table.get(key), str) or not table[key].strip()
    ]
    if not isinstance(table.get("message", ""), str):
        problems.append("`message` must be a text")
    if table.get("episodes", "one") not in list(EpisodeRewards):
        problems.append(f"`episodes` must be one of {', '.join(EpisodeRewards)}")
    criteria = table.get("criteria", {})
    if not isinstance(criteria, dict):
        problems.append("`criteria` must be a table")
    try:
        json.dumps(criteria, allow_nan=False)
    except (TypeError, ValueError) as error:
        problems.append(f"`criteria` holds what JSON cannot ({error})")
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return RubricFile(
        name=table["name"],
        judge=table["judge"],
        criteria=criteria,
        message=table.get("message", ""),
        episodes=EpisodeRewards(table.get("episodes", "one")),
    )


def load_rubric(name_or_path: str | Path) -> RubricFile:
    """A rubric whose judge exists and accepts the criteria.

    Raises ConfigError, with every problem that the judge's `check` lists.
    """
    rubric = read_rubric(name_or_path)
    problems = load_judge(rubric.judge).check(rubric.criteria)
    if problems:
        raise ConfigError(f"rubric {rubric.name}: {'; '.join(problems)}")
    return rubric


def load_judge(name: str) -> Judge:
    """The judge that `module:Class` names, made without arguments. Raises ConfigError."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"judge {name!r} is not of the form `module:Class`")
    try:
        judge = getattr(importlib.import_module(module_name), class_name)()
    except ModuleNotFoundError as error:
        raise ConfigError(f"judge {name}: there is no module {error.name}") from error
    except AttributeError as error:
        raise ConfigError(f"judge {name}: {error}") from error
    except Exception as error:  # A judge is user code: importing or making it may do anything.
        raise ConfigError(
            f"judge {name} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(judge, Judge):
        raise ConfigError(f"judge {name} lacks `judge` or `check` (see judges/README.md)")
    return judge


def _rubric_text(name_or_path: str) -> tuple[str, str]:
    """(what to call the rubric in a message, its TOML)."""
    try:
        if name_or_path.endswith(".toml") or "/" in name_or_path:
            return name_or_path, Path(name_or_path).read_text(encoding="utf-8")
        if name_or_path not in shipped_rubrics():
            raise ConfigError(
                f"there is no rubric {name_or_path!r}; shipped: {', '.join(shipped_rubrics())} "
                "(or give a path to a .toml file)"
            )
        folder = importlib.resources.files(_SHIPPED) / "rubrics"
        text = (folder / f"{name_or_path}.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rubric {name_or_path} cannot be read: {error}") from None
    return f"rubric {name_or_path}", text
