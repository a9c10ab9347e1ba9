"""A learner's process as the store sees it: claims and commits until it is killed.

python store_worker.py URL BATCH
"""

from __future__ import annotations

import asyncio
import os
import sys

from online_sao.errors import LeaseLost
from online_sao.store.sql import SqlStore
from online_sao.types import (
    UPDATE_PREFIX,
    NewVersion,
    TokenTrace,
    Update,
    UpdateKind,
    new_id,
    utc_now,
)


async def learn(url: str, size: int) -> None:
    store = SqlStore(url)
    await store.open()
    owner = f"learner-{os.getpid()}"
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        batch = await store.claim_trajectories(
            owner, size=size, lease_s=0.5, max_lag=10**6, max_train_tokens=1000, skip_cut=False
        )
        if not batch:
            await asyncio.sleep(0.02)
            continue
        ids = tuple(rollout_id for t in batch for rollout_id in t.rollout_ids)
        parent = (await store.newest_stable()).number
        update = Update(new_id(UPDATE_PREFIX), utc_now(), UpdateKind.POLICY, ids, {})
        traces = [TokenTrace(rollout_id, (0.5,), (1.0,), (1.0,), (True,)) for rollout_id in ids]
        try:
            await store.commit_update(owner, update, NewVersion("v", "ab" * 32, parent), traces)
        except LeaseLost:
            await store.release_leases(owner)


if __name__ == "__main__":
    asyncio.run(learn(sys.argv[1], int(sys.argv[2])))
