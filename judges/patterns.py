"""Regular expressions on text that users wrote, without letting one stop the service.

Python's `re` cannot be interrupted, and a harmless-looking pattern can take hours on an unlucky
text (`.*a.*b` on some thousand characters). So patterns are run in a small process of their own,
on texts of bounded length, for a bounded time. It costs some 30 ms of another core, and only
where a rubric has patterns.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from online_sao.errors import JudgeError

MAX_TEXT = 20_000
"""Characters; longer texts are not searched."""
LIMIT_S = 5.0
"""Seconds for all patterns of one table on one text; ample on a busy machine."""

_SCRIPT = """
import json, re, sys
patterns, text = json.load(sys.stdin)
json.dump([sum(1 for _ in re.finditer(pattern, text)) for pattern in patterns], sys.stdout)
"""


async def find_patterns(
    patterns: Sequence[str], text: str, *, limit_s: float = LIMIT_S
) -> list[int]:
    """How often each pattern is found in `text`, which has at most `MAX_TEXT` characters.

    Raises JudgeError when it takes longer than `limit_s`, and ends the process.
    """
    if len(text) > MAX_TEXT:
        raise ValueError(f"a text of {len(text)} characters; at most {MAX_TEXT} are searched")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _SCRIPT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(limit_s):
            answer, _ = await process.communicate(json.dumps([list(patterns), text]).encode())
    except TimeoutError:
        raise JudgeError(f"the rubric's patterns took longer than {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise JudgeError(f"the search for patterns ended with code {process.returncode}")
    found: list[int] = json.loads(answer)
    return found
