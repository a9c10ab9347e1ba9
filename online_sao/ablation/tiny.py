"""The tiny policy: a small Llama, taught imperfect demonstrations, in a servable folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from online_sao.ablation import vocabulary
from online_sao.ablation.tasks import Task
from online_sao.learner.export import describe
from online_sao.manifest import MANIFEST_NAME

PROBES = vocabulary.encode("<bos>37+85*2=<call>85*2</call>")
_WARMUP_STEPS = 50
_SEED = 20_000
"""Of the demonstrations; the runs' seeds are small numbers."""


@dataclass(frozen=True, slots=True)
class TinyPolicy:
    """The network, and how it is taught before it learns by itself."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    steps: int = 1500
    batch: int = 64
    learning_rate: float = 3e-3

    def folder_name(self, task: Task) -> str:
        """One name for one network taught one task."""
        told = {
            "network": dataclasses.asdict(self),
            "task": [task.name, repr(task)],
            "tokens": vocabulary.TOKENS,
        }
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        return f"{task.name}-{digest[:12]}"


def prepare(
    tiny: TinyPolicy, task: Task, parent: Path, step: Callable[[int, int], None] | None = None
) -> Path:
    """The servable folder of the warm-started policy below `parent`; made unless it is there.

    `step` is told (steps done, steps in all). Written aside and renamed.
    """
    folder = parent / tiny.folder_name(task)
    if is_prepared(tiny, task, parent):
        return folder
    model = new_model(tiny)
    teach(model, tiny, task, step)
    aside = parent / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    save(model, aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return folder


def is_prepared(tiny: TinyPolicy, task: Task, parent: Path) -> bool:
    """Whether `prepare` has nothing left to do."""
    return (parent / tiny.folder_name(task) / MANIFEST_NAME).exists()


def new_model(tiny: TinyPolicy) -> Any:
    """The untaught network; the same one every time."""
    config = LlamaConfig(
        vocab_size=len(vocabulary.TOKENS),
        hidden_size=tiny.width,
        intermediate_size=2 * tiny.width,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        bos_token_id=vocabulary.id_of(vocabulary.BOS),
        eos_token_id=vocabulary.id_of(vocabulary.END),
        pad_token_id=vocabulary.id_of(vocabulary.PAD),
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float()


def save(model: Any, folder: Path) -> None:
    """Write `model` as version 0: weights, config, a tokenizer's place, the manifest."""
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"note": "token ids alone; no tokenizer"}')
    (folder / MANIFEST_NAME).write_text(describe(folder, PROBES).to_json())


def teach(
    model: Any, tiny: TinyPolicy, task: Task, step: Callable[[int, int], None] | None = None
) -> None:
    """Supervised learning on fresh demonstrations; the loss is on the policy's own tokens."""
    dice = random.Random(_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tiny.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        tiny.learning_rate,
        total_steps=tiny.steps + 1,
        pct_start=min(0.3, _WARMUP_STEPS / tiny.steps),
    )
    model.train()
    for done in range(tiny.steps):
        ids, targets = demonstrations(task, tiny.batch, dice)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step is not None:
            step(done + 1, tiny.steps)
    model.eval()


def demonstrations(task: Task, count: int, dice: random.Random) -> tuple[Tensor, Tensor]:
    """Ids (B, T) and targets (B, T) of fresh demonstrations, -100 off the policy's tokens."""
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(count):
        prompt = task.prompt(dice)
        ids = list(prompt.ids)
        targets = [-100] * len(ids)
        for piece in task.demonstration(prompt, dice):
            tokens = vocabulary.encode(piece.text)
            ids += tokens
            targets += tokens if piece.action else [-100] * len(tokens)
        rows.append((ids, targets))
    width = max(len(ids) for ids, _ in rows)
    pad = vocabulary.id_of(vocabulary.PAD)
    return (
        torch.tensor([_padded(ids, width, pad) for ids, _ in rows]),
        torch.tensor([_padded(targets, width, -100) for _, targets in rows]),
    )


def _padded(row: Sequence[int], width: int, value: int) -> list[int]:
    return [*row, *[value] * (width - len(row))]
