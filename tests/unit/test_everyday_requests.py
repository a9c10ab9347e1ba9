"""The benchmarks' file of everyday requests is what its readers count on."""

from __future__ import annotations

from pathlib import Path

REQUESTS = Path(__file__).parents[2] / "benchmarks" / "data" / "everyday_requests.txt"


def test_there_are_at_least_160_different_requests_of_5_to_25_words() -> None:
    lines = REQUESTS.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 160
    assert len({line.casefold() for line in lines}) == len(lines)
    assert [line for line in lines if not 5 <= len(line.split()) <= 25] == []
    assert [line for line in lines if line != line.strip()] == []
