"""Two ranks compute what one process does: updates, versions, states, errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_world import Job, on_ranks, updates
from safetensors.torch import load_file
from tiny_llama import make_folder

from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import ConfigError
from online_sao.learner.export import SavedState
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.trainer import SaoTrainer
from online_sao.manifest import Manifest

KL = {"kl_coef": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "top": {"learner": {"policy_layers": 2}, "algorithm": KL},
    "recomputed": {
        "learner": {"policy_layers": 0, "activation_checkpointing": True}, "algorithm": KL,
    },
    "untied": {"learner": {"policy_layers": 0, "micro_batch_tokens": 24}, "algorithm": KL},
    "vapo": {"learner": {"policy_layers": 1}, "algorithm": {"kl_coef": 0.0, "variant": "vapo"}},
    "no critic": {"algorithm": {"kl_coef": 0.0, "variant": "running_mean"}},
    "spo": {"algorithm": {"kl_coef": 0.0, "variant": "spo"}},
    "one trajectory": {"size": 1},
}  # fmt: skip
BF16 = {"dtype": "bfloat16", "policy_lr": 1e-3, "critic_lr": 1e-3, "policy_layers": 2}


@dataclass(frozen=True)
class World:
    """All that two ranks were asked to do, in one life of theirs."""

    root: Path
    said: list[dict[str, Any]]
    """By rank, by job."""

    def base(self, name: str) -> Path:
        return self.root / {"untied": "untied", "bf16": "bf16"}.get(name, "base")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("ranks")
    base = make_folder(root / "base")
    make_folder(root / "untied", tie_word_embeddings=False)
    make_folder(root / "bf16", torch.bfloat16)
    made = World(root, [])
    updates(ALONE, base, folder(root, "before"))
    jobs: dict[str, Job] = {
        name: ("updates", {"base": made.base(name), "out": folder(root, f"two-{name}"), **case})
        for name, case in CASES.items()
    }
    jobs["bf16"] = (
        "updates",
        {
            "base": root / "bf16", "out": folder(root, "two-bf16"), "learner": BF16,
            "algorithm": KL,
        },
    )  # fmt: skip
    at = (root / "before" / "version", root / "before" / "state")
    jobs["resumed"] = ("updates", {"base": base, "out": folder(root, "two-resumed"), "state": at})
    jobs["nan"] = ("nan_on_one_rank", {"base": base, "out": folder(root, "nan")})
    made.said.extend(on_ranks(root, jobs))
    return made


def folder(root: Path, name: str) -> Path:
    made = root / name
    made.mkdir()
    return made


def close(a: Any, b: Any, rel: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if a[name] is None:
            assert b[name] is None
        elif not name.startswith("seconds_"):
            assert b[name] == pytest.approx(a[name], rel=rel, abs=rel), name


def apart(a: Path, b: Path) -> float:
    """The largest difference between the tensors of two versions."""
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in left.items()} == {
        n: (t.dtype, t.shape) for n, t in right.items()
    }
    return max(float((left[n].float() - right[n].float()).abs().max()) for n in left)


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", sorted(CASES))
def test_three_updates_on_two_ranks_are_those_of_one_process(
    world: World, tmp_path: Path, name: str
) -> None:
    """At 300 times the default rates: the weights move by more than 0.01 in these three steps."""
    base, there = world.base(name), world.root / f"two-{name}"
    alone = updates(ALONE, base, tmp_path, **CASES[name])
    for said in world.said:
        for one, two in zip(alone, said[name], strict=True):
            assert one["kind"] == two["kind"]
            close(one["metrics"], two["metrics"], 2e-4)
            for a, b in zip(one["traces"], two["traces"], strict=True):
                for part in ("values", "advantages", "ratios"):
                    assert b[part] == pytest.approx(a[part], rel=2e-4, abs=2e-4)
    first, second = alone[0]["metrics"], world.said[0][name][0]["metrics"]
    assert second["policy_grad_norm"] == pytest.approx(first["policy_grad_norm"], rel=1e-5)
    if first["critic_grad_norm"] is not None:
        assert second["critic_grad_norm"] == pytest.approx(first["critic_grad_norm"], rel=1e-5)
    assert apart(tmp_path / "version", there / "version") < 2e-4
    assert apart(tmp_path / "version", base) > 1e-2
    Manifest.read(there / "version").verify(there / "version")


def test_bf16_on_two_ranks_is_bf16_in_one_process(world: World, tmp_path: Path) -> None:
    alone = updates(ALONE, world.base("bf16"), tmp_path, BF16, KL)
    both = world.said[0]["bf16"]
    # The first update sees the very same weights; bf16 sums in another order differ in 2^-8.
    close(alone[0]["metrics"], both[0]["metrics"], 2e-2)
    assert both[0]["metrics"]["clip_ratio"] == 0.0
    assert apart(tmp_path / "version", world.root / "two-bf16" / "version") < 8e-3


def test_a_state_goes_from_one_process_to_two_and_back(world: World, tmp_path: Path) -> None:
    at = (world.root / "before" / "version", world.root / "before" / "state")
    alone = updates(ALONE, world.base(""), tmp_path, state=at)
    for a, b in zip(alone, world.said[0]["resumed"], strict=True):
        close(a["metrics"], b["metrics"], 5e-4)
    two = world.root / "two-resumed"
    a, b = SavedState.read(tmp_path / "state"), SavedState.read(two / "state")
    assert (a.updates, a.policy_steps, a.critic_steps) == (6, 6, 12)
    assert (b.updates, b.policy_steps, b.critic_steps) == (6, 6, 12)
    for left, right in ((a.policy, b.policy), (a.critic, b.critic)):
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=2e-3, atol=5e-4)
    back = folder(tmp_path, "back")
    onwards = updates(ALONE, world.base(""), back, state=(two / "version", two / "state"), count=1)
    assert onwards[0]["kind"] == "policy"


def test_nan_on_one_rank_is_met_by_both_and_changes_nothing(world: World) -> None:
    for said in world.said:
        error, next_update = said["nan"]
        assert "log-probabilities" in error
        assert next_update["kind"] == "policy"
    states = [SavedState.read(world.root / "nan" / name) for name in ("before", "after")]
    assert same(states[0].policy, states[1].policy)
    assert same(states[0].critic, states[1].critic)
    assert states[0].critic_steps == states[1].critic_steps == 2


def test_rank_0_alone_writes(world: World) -> None:
    """Each rank was told to write into the same new folder: a second writer would have failed."""
    assert (world.root / "two-top" / "version" / "manifest.json").exists()
    assert (world.root / "two-top" / "state" / "state.json").exists()


def test_adapters_and_ranks_do_not_go_together(world: World) -> None:
    with pytest.raises(ConfigError, match="lora_rank"):
        SaoTrainer(AlgorithmSettings(), LearnerSettings(lora_rank=4), world.base(""), Ranks(0, 2))
