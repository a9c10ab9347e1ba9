"""Checks and times an SAO update on a CUDA machine: bf16, a checkpoint or Qwen3-0.6B's shape.

1. Replies are sampled on the device by transformers, in bf16, with their log-probabilities; the
   trainer must then find every ratio near 1: clip ratio under 0.1 %, mean |log r| under 0.05.
2. With `--ranks N` the first update is done again by N processes (FSDP2): losses and gradient norms
   must be those of one process, to 2 %.
3. Updates and bare torch forwards and backwards of the same work take turns, as in `../update.py`:
   `speed_ratio` is the median of bare seconds / ours.

Without CUDA it ends with code 2. `--cpu-smoke` runs all of it on a tiny shape on the CPU, which
shows that the script works and measures nothing.

    python benchmarks/gpu/check_update.py
    python benchmarks/gpu/check_update.py --model /models/Qwen3-0.6B --ranks 2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the CPU twin, for its bare loop
from update import BareLoop, padding_waste

from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.learner.export import describe
from online_sao.learner.models import Compute
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.trainer import SaoTrainer
from online_sao.manifest import MANIFEST_NAME
from online_sao.types import Trajectory

console = Console(stderr=True)
QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
SMOKE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256,
}  # fmt: skip
PROBES = tuple(range(3, 19))
LIMITS = {"clip_ratio": 1e-3, "log_ratio_abs_mean": 0.05}
COMPARED = ("policy_loss", "value_loss", "policy_grad_norm", "critic_grad_norm", "kl_start")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; else random weights")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a reply")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1, help="do it again on so many processes")
    parser.add_argument("--cpu-smoke", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu_smoke:
        args.trajectories, args.tokens, args.rounds = 6, 8, 1
    return args


def learner_settings(args: argparse.Namespace) -> LearnerSettings:
    return LearnerSettings(
        dtype="bfloat16",
        policy_layers=0,
        critic_layers=0,
        micro_batch_tokens=512 if args.cpu_smoke else 16384,
        max_train_tokens=4096,
        policy_lr=1e-6,
        critic_lr=5e-6,
        threads=1 if args.cpu_smoke else 0,
    )


def make_model(args: argparse.Namespace, folder: Path) -> Path:
    """A folder that the trainer takes for a start policy."""
    if args.model is not None:
        shutil.copytree(args.model, folder)
    else:
        torch.manual_seed(0)
        shape = SMOKE if args.cpu_smoke else QWEN3_06B
        config = Qwen3Config(**shape, tie_word_embeddings=True, initializer_range=0.05)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / MANIFEST_NAME).write_text(describe(folder, PROBES).to_json())
    return folder


@torch.no_grad()
def sampled(folder: Path, args: argparse.Namespace) -> list[Trajectory]:
    """Replies to random prompts, sampled in bf16 on the device, 8 at a time."""
    model = Compute.chosen(learner_settings(args)).load(folder)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    made: list[Trajectory] = []
    while len(made) < args.trajectories:
        generator = torch.Generator().manual_seed(len(made))
        length = 4 + len(made) % 12 if args.cpu_smoke else 64 + 8 * (len(made) % 24)
        ids = torch.randint(20, min(500, model.config.vocab_size), (8, length), generator=generator)
        out = model.generate(
            ids.to(model.device), attention_mask=torch.ones_like(ids).to(model.device),
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=args.tokens,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        replies = out.sequences[:, length:]
        steps = [
            logits.float().log_softmax(-1).gather(1, replies[:, t, None]).squeeze(1).cpu()
            for t, logits in enumerate(out.logits)
        ]
        logprobs = torch.stack(steps, dim=1).tolist()
        for prompt, reply, logprob in zip(ids.tolist(), replies.tolist(), logprobs, strict=True):
            made.append(trajectory(len(made), prompt, reply, logprob))
    return made[: args.trajectories]


def trajectory(
    number: int, prompt: list[int], reply: list[int], logprobs: list[float]
) -> Trajectory:
    return Trajectory(
        rollout_ids=(f"rollout-{number}",),
        token_ids=(*prompt, *reply),
        action_mask=(False,) * len(prompt) + (True,) * len(reply),
        logprobs=(math.nan,) * len(prompt) + tuple(logprobs),
        reward=float(number % 2),
        temperature=1.0,
    )


def first_update(
    folder: Path, args: argparse.Namespace, trajectories: list[Trajectory], ranks: Ranks
) -> tuple[SaoTrainer, dict[str, Any]]:
    trainer = SaoTrainer(AlgorithmSettings(), learner_settings(args), folder, ranks)
    trainer.restore(folder, None)
    return trainer, dict(trainer.update(trajectories, critic_only=False).metrics)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def timed(
    trainer: SaoTrainer, bare: BareLoop, args: argparse.Namespace, trajectories: list[Trajectory]
) -> dict[str, float]:
    """Bare and ours in turns, after one warm-up of the bare loop."""

    def ours() -> None:
        trainer.update(trajectories, critic_only=False)

    seconds(bare)
    pairs = [(seconds(bare), seconds(ours)) for _ in range(args.rounds)]
    update_s = statistics.median(o for _, o in pairs)
    return {
        "speed_ratio": statistics.median(b / o for b, o in pairs),
        "update_s": update_s,
        "tokens_per_s": sum(len(t.token_ids) for t in trajectories) / update_s,
        "padding_waste": padding_waste(trajectories, learner_settings(args), ALONE),
    }


def on_ranks(folder: Path, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The first update's metrics as `args.ranks` processes find them."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    smoke = ["--cpu-smoke"] if args.cpu_smoke else []
    command = [sys.executable, *start, __file__, *smoke, "--rank-of", str(scratch)]
    command += ["--model", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads((scratch / "metrics.json").read_text())
    return found


def one_of_several(args: argparse.Namespace) -> None:
    ranks = Ranks.join()
    trajectories = torch.load(args.rank_of / "trajectories.pt", weights_only=False)
    _, metrics = first_update(args.model, args, trajectories, ranks)
    if ranks.first:
        (args.rank_of / "metrics.json").write_text(json.dumps(metrics))
    ranks.leave()


def main() -> int:
    args = arguments()
    if not torch.cuda.is_available() and not args.cpu_smoke:
        print("no CUDA device is here: nothing was measured", file=sys.stderr)
        return 2
    if args.rank_of is not None:
        one_of_several(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="online-sao-bench-") as name:
        scratch = Path(name)
        folder = make_model(args, scratch / "model")
        trajectories = sampled(folder, args)
        console.print(f"sampled {len(trajectories)} replies")
        trainer, metrics = first_update(folder, args, trajectories, ALONE)
        well = {key: metrics[key] < limit for key, limit in LIMITS.items()}
        result: dict[str, Any] = {key: metrics[key] for key in (*LIMITS, *COMPARED)}
        if args.ranks > 1:
            torch.save(trajectories, scratch / "trajectories.pt")
            theirs = on_ranks(folder, args, scratch)
            apart = {k: abs(theirs[k] - metrics[k]) / (abs(metrics[k]) + 1e-3) for k in COMPARED}
            result["ranks_apart"] = max(apart.values())
            well["ranks_apart"] = result["ranks_apart"] < 0.02
        bare = BareLoop(folder, learner_settings(args), trajectories)
        result |= timed(trainer, bare, args, trajectories)
        if torch.cuda.is_available():
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print("RESULT " + json.dumps({**result, "well": well}))
    return 0 if all(well.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
