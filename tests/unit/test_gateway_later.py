import asyncio

import pytest

from online_sao.gateway.later import Later, uninterrupted


class Drops:
    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        self.number += 1


async def test_a_late_completion_gives_up_in_words_when_the_lifespan_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drops = Drops()
    later = Later(drops.count)
    tries: list[int] = []

    async def never() -> bool:
        tries.append(1)
        return False

    assert later.add("chatcmpl-x", never, (60.0, 60.0))
    await asyncio.wait_for(later.settle(), 1.0)
    assert tries == [1]
    assert drops.number == 1
    assert "action=late_write_dropped name=chatcmpl-x" in caplog.text


async def test_later_refuses_more_than_its_limit() -> None:
    drops = Drops()
    later = Later(drops.count, limit=1)

    async def done() -> bool:
        return True

    assert later.add("a", done, (60.0,))
    assert not later.add("b", done, (60.0,))
    await later.settle()
    assert len(later) == 0


async def test_uninterrupted_work_ends_before_its_caller_is_cancelled() -> None:
    ended: list[str] = []

    async def work() -> str:
        await asyncio.sleep(0.05)
        ended.append("work")
        return "done"

    async def caller() -> None:
        try:
            await uninterrupted(work())
        finally:
            ended.append("caller")

    task = asyncio.create_task(caller())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work", "caller"]
    assert await uninterrupted(work()) == "done"


async def test_a_late_write_is_tried_until_it_succeeds() -> None:
    drops = Drops()
    later = Later(drops.count)
    tries: list[int] = []

    async def third_time() -> bool:
        tries.append(1)
        return len(tries) == 3

    assert later.add("x", third_time, (0.0, 0.0, 0.0, 60.0))
    async with asyncio.timeout(1):
        while len(later):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(tries) == 3
    assert drops.number == 0
