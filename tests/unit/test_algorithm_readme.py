"""The table of equations names what there is: every function, and tests that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from online_sao.algorithm import baselines, sao, variants

UNIT = Path(__file__).parent
README = Path(inspect.getfile(sao)).with_name("README.md").read_text()


@pytest.mark.parametrize("module", [sao, variants, baselines])
def test_every_public_function_is_in_the_readme(module: object) -> None:
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and inspect.getmodule(value) is module
    ]
    assert own
    assert [name for name in own if f"`{name}`" not in README] == []


def test_every_test_the_readme_names_exists() -> None:
    # `test_file.py::test_name`, or a name in one of the algorithm's own files.
    elsewhere = re.findall(r"`(test_\w+\.py)::(test_\w+)`", README)
    here = re.findall(r"`(test_\w+)`", README)
    assert len(here) > 40
    own = "".join(path.read_text() for path in UNIT.glob("test_algorithm_*.py"))
    assert [name for name in here if f"def {name}(" not in own] == []
    assert [x for x in elsewhere if f"def {x[1]}(" not in (UNIT / x[0]).read_text()] == []
