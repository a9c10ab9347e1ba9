"""One SAO update against a bare torch forward/backward of the same work, and peak memory.

The bare loop has the same networks in the same dtype and attention, the same layers trained, the
same K critic passes, the same KL forward over the start policy's top layers on the same trunk. It
does nothing else: no masters, no optimizer, no clipping, no micro-batches, no metrics, no traces.
Both take turns in one process, so that a busy machine slows both; `speed_ratio` is the median over
the rounds of bare seconds / our seconds.

- `speed_ratio`: 1.0 means that an update costs what its arithmetic costs.
- `padding_waste`: the share of the tokens in the micro-batches that is padding.
- `--ranks 2`: the same on two processes, the bare loop sharded by FSDP2 alike; in every round the
  slower one counts.
- `--soak N`: after the rest, N updates on varying replies; `soak_mib` is how much the process grew
  between the first quarter and the end.
- `learner_peak_gib`: the most memory of a process that restores, updates, writes a version and its
  state, and restores again.
- `engine_peak_gib`: the same of an embedded engine that writes 32 replies at once.

    python benchmarks/update.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode import make_prompts, through_engine
from engine_process import engine_process, model_folder
from rich.console import Console
from rich.progress import track
from torch import Tensor

from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.dealing import micro_batches
from online_sao.learner.models import (
    Compute,
    CriticNetwork,
    Decoder,
    critic_parameters,
    first_trained,
)
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.sharding import shard
from online_sao.learner.trainer import SaoTrainer
from online_sao.types import Trajectory

console = Console(stderr=True)
FIRST_ID, LAST_ID = 1000, 20000
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""What the service starts its learner with: freed memory stays with the process."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--model", type=Path, help="a prepared folder; else it is made (30 s)")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100, help="mean length, prompt and reply")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--micro-batch-tokens", type=int)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the learner")
    parser.add_argument("--soak", type=int, default=0, help="updates to watch the memory over")
    parser.add_argument("--soak-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peak-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (4 if args.quick else 10)
    return args


def learner_settings(args: argparse.Namespace) -> LearnerSettings:
    chosen: dict[str, object] = {"dtype": args.dtype, "threads": args.threads}
    if args.micro_batch_tokens:
        chosen["micro_batch_tokens"] = args.micro_batch_tokens
    return LearnerSettings.model_validate(chosen)


def make_trajectories(count: int, tokens: int) -> list[Trajectory]:
    """Random tokens, 40 % of them prompt; lengths from 0.6 to 1.4 times the mean."""
    rng = random.Random(7)
    made = []
    for number in range(count):
        n = round(tokens * (0.6 + 0.8 * number / max(1, count - 1)))
        prompt = round(0.4 * n)
        made.append(
            Trajectory(
                rollout_ids=(f"rollout-{number}",),
                token_ids=tuple(rng.randint(FIRST_ID, LAST_ID) for _ in range(n)),
                action_mask=(False,) * prompt + (True,) * (n - prompt),
                logprobs=(math.nan,) * prompt + (-9.0,) * (n - prompt),
                reward=float(number % 2),
                temperature=1.0,
            )
        )
    rng.shuffle(made)
    return made


class BareLoop:
    """The arithmetic of an update and nothing else, in plain torch."""

    def __init__(
        self,
        folder: Path,
        settings: LearnerSettings,
        trajectories: list[Trajectory],
        ranks: Ranks = ALONE,
    ) -> None:
        compute = Compute.chosen(settings)
        self.policy, self.start = compute.load(folder), compute.load(folder)
        layers = self.policy.model.layers
        self.shared = first_trained(Decoder.of(self.policy), settings.policy_layers)
        self.trunk: list[Tensor] = []
        """The last hidden states below the layers that train."""
        layers[self.shared].register_forward_pre_hook(
            lambda _, args: self.trunk.__setitem__(slice(None), [args[0].detach()])
        )
        trained = [*layers[self.shared :], self.policy.model.norm] if self.shared else [self.policy]
        for module in trained:
            module.requires_grad_(True)
        self.critic = CriticNetwork(self.start, Decoder.of(self.start), settings.critic_layers)
        for parameter in critic_parameters(self.critic).values():
            parameter.requires_grad_(True)
        if ranks.size > 1:
            for base, stack in (
                (self.policy.model, layers),
                (self.critic.backbone, self.critic.layers),
                (None, self.start.model.layers),
            ):
                shard(
                    base, stack, ranks, trained=[p for p in stack.parameters() if p.requires_grad]
                )
        whole = TrajectoryBatch.from_trajectories(trajectories, compute.device)
        own = micro_batches(whole, settings.micro_batch_tokens, ranks) if ranks.size > 1 else []
        rows = [part.rows for part in own if part.counts] or [torch.arange(len(trajectories))]
        self.batch = whole.select(torch.cat(rows))
        self.passes = AlgorithmSettings().critic_updates
        self.kl_coef = AlgorithmSettings().kl_coef

    def __call__(self) -> None:
        ids, mask = self.batch.token_ids, self.batch.action_mask
        for _ in range(self.passes):
            self.critic.zero_grad(set_to_none=True)
            values = self.critic(ids)[mask]
            (values - 1.0).square().mean().backward()
        self.policy.zero_grad(set_to_none=True)
        rows, columns = mask.nonzero(as_tuple=True)
        out = self.policy.model(input_ids=ids, use_cache=False)
        log_p = self._log_softmax(self.policy, out.last_hidden_state[rows, columns - 1])
        with torch.no_grad():
            start = self._start_hidden(ids, self.trunk[0])
            log_q = self._log_softmax(self.start, start[rows, columns - 1])
        taken = log_p.gather(1, ids[rows, columns][:, None]).squeeze(1)
        kl = (log_p.exp() * (log_p - log_q)).sum(dim=1)
        (-taken.mean() + self.kl_coef * kl.mean()).backward()

    def _start_hidden(self, ids: Tensor, state: Tensor) -> Tensor:
        """The start policy's top layers on the trunk's hidden states; all of it without a trunk."""
        if self.shared == 0:
            return self.start.model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]
        base, length = self.start.model, state.shape[1]
        places = base.rotary_emb(state, torch.arange(length, device=state.device)[None])
        ahead = torch.full((length, length), torch.finfo(state.dtype).min, device=state.device)
        causal = ahead.triu(1).to(state.dtype)[None, None]
        for layer in base.layers[self.shared :]:
            state = layer(state, attention_mask=causal, position_embeddings=places)
        return base.norm(state)  # type: ignore[no-any-return]

    @staticmethod
    def _log_softmax(model: Any, states: Tensor) -> Tensor:
        return model.lm_head(states).float().log_softmax(dim=1)  # type: ignore[no-any-return]


def seconds(work: Callable[[], object], ranks: Ranks) -> float:
    """Of all ranks, started together; the slowest's."""
    ranks.all_say("ready")
    begin = time.perf_counter()
    work()
    ranks.all_say("done")
    return time.perf_counter() - begin


def compare(folder: Path, args: argparse.Namespace, ranks: Ranks) -> dict[str, float]:
    """Bare and ours in turns, after one warm-up each."""
    settings = learner_settings(args)
    trajectories = make_trajectories(args.trajectories, args.tokens)
    trainer = SaoTrainer(AlgorithmSettings(), settings, folder, ranks)
    trainer.restore(folder, None)
    bare = BareLoop(folder, settings, trajectories, ranks)

    def ours() -> None:
        trainer.update(trajectories, critic_only=False)

    pairs = []
    rounds = track(
        range(args.rounds + 1), "bare and ours in turns", console=console, disable=not ranks.first
    )
    for turn in rounds:
        if turn % 2:
            b, o = seconds(bare, ranks), seconds(ours, ranks)
        else:
            o, b = seconds(ours, ranks), seconds(bare, ranks)
        if turn:
            pairs.append((b, o))
    return {
        "speed_ratio": round(statistics.median(b / o for b, o in pairs), 3),
        "speed_ratio_best": round(min(b for b, _ in pairs) / min(o for _, o in pairs), 3),
        "update_s": round(statistics.median(o for _, o in pairs), 3),
        "update_best_s": round(min(o for _, o in pairs), 3),
        "bare_s": round(statistics.median(b for b, _ in pairs), 3),
        "padding_waste": round(padding_waste(trajectories, settings, ranks), 3),
        "tokens": float(sum(len(t.token_ids) for t in trajectories)),
        "action_tokens": float(sum(sum(t.action_mask) for t in trajectories)),
    }


def padding_waste(trajectories: list[Trajectory], settings: LearnerSettings, ranks: Ranks) -> float:
    """Share of padding among the tokens of all ranks' micro-batches."""
    batch = TrajectoryBatch.from_trajectories(trajectories)
    padded = 0
    for rank in range(ranks.size):
        for part in micro_batches(batch, settings.micro_batch_tokens, Ranks(rank, ranks.size)):
            padded += len(part.rows) * int(batch.lengths[part.rows].max())
    return 1.0 - int(batch.lengths.sum()) / padded


def soak(folder: Path, args: argparse.Namespace) -> float:
    """How much the process grew (MiB) between the first quarter of the updates and the end."""
    trainer = SaoTrainer(AlgorithmSettings(), learner_settings(args), folder)
    trainer.restore(folder, None)
    grown = 0.0
    for number in track(range(args.soak), "soak", console=console):
        trainer.update(make_trajectories(8, 40 + number % 24), critic_only=False)
        if number == args.soak // 4:
            grown = -resident_mib()
    return grown + resident_mib()


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def live_a_life(folder: Path, args: argparse.Namespace) -> float:
    """Everything a learner's process does; its peak memory (GiB)."""
    trainer = SaoTrainer(AlgorithmSettings(), learner_settings(args), folder)
    trainer.restore(folder, None)
    trajectories = make_trajectories(args.trajectories, args.tokens)
    with tempfile.TemporaryDirectory(prefix="online-sao-bench-") as scratch:
        version, state = Path(scratch) / "version", Path(scratch) / "state"
        for _ in range(2):
            trainer.update(trajectories, critic_only=False)
        trainer.export_policy(version)
        trainer.save_state(state)
        trainer.restore(version, state)
        trainer.update(trajectories, critic_only=False)
    # Not getrusage: a child's maximum there starts from what its parent had when it was made.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def in_its_own_process(folder: Path, args: argparse.Namespace, *mode: str) -> float:
    """`live_a_life` or `soak` in a process started as the service starts its learner."""
    command = [sys.executable, __file__, *mode, "--model", str(folder)]
    command += ["--threads", str(args.threads), "--dtype", args.dtype]
    if args.micro_batch_tokens:
        command += ["--micro-batch-tokens", str(args.micro_batch_tokens)]
    done = subprocess.run(
        command, env={**os.environ, **MALLOC}, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout.split()[-1])


def engine_peak(folder: Path, args: argparse.Namespace) -> float:
    """An engine that writes 32 replies at once."""
    with engine_process(folder, threads=args.threads, dtype=args.dtype) as engine:
        asyncio.run(through_engine(engine.url, make_prompts(32), 20 if args.quick else 60))
        return engine.peak_gib()


def on_ranks(folder: Path, args: argparse.Namespace) -> None:
    """This very benchmark under torchrun; rank 0 prints the result."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    given = [word for word in sys.argv[1:] if word != "--model" and word != str(args.model)]
    threads = str(max(1, args.threads // args.ranks))
    subprocess.run(
        [sys.executable, *start, __file__, *given, "--model", str(folder)],
        env={**os.environ, **MALLOC, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"},
        check=True,
    )


def one_of_several(args: argparse.Namespace) -> None:
    """A rank of the benchmark under torchrun."""
    ranks = Ranks.join()
    result = compare(args.model, args, ranks)
    if ranks.first:
        print("RESULT " + json.dumps({"ranks": ranks.size, **result}))
    ranks.leave()


def main() -> None:
    args = arguments()
    if args.peak_only:
        print(live_a_life(args.model, args))
        return
    if args.soak_only:
        print(soak(args.model, args))
        return
    if "WORLD_SIZE" in os.environ:
        one_of_several(args)
        return
    with model_folder(args.model) as folder:
        if args.ranks > 1:
            on_ranks(folder, args)
            return
        result = compare(folder, args, ALONE)
        console.print(f"speed: {result}")
        result["learner_peak_gib"] = round(in_its_own_process(folder, args, "--peak-only"), 2)
        console.print(f"learner's peak: {result['learner_peak_gib']} GiB")
        result["engine_peak_gib"] = round(engine_peak(folder, args), 2)
        if args.soak:
            grown = in_its_own_process(folder, args, "--soak-only", "--soak", str(args.soak))
            result["soak_mib"] = round(grown, 1)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
