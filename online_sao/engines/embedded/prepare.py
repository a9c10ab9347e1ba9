"""`python -m online_sao.engines.embedded.prepare --model NAME --out DIR`: version 0 of a policy.

Finds the model, converts it once, and publishes a version folder whole or not at all: config,
tokenizer, safetensors in the serving dtype, generation_config with every id that ends a reply,
and a manifest with probe tokens.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from online_sao.engines import running
from online_sao.errors import ModelError, OnlineSaoError

logger = logging.getLogger(__name__)

STEPS = 6
PROBE_GIVEN, PROBE_TOKENS = 4, 16
PROBE_CHAT = ({"role": "user", "content": "Name three things that a good answer has."},)
Say = Callable[[str], None]


def main(argv: list[str] | None = None) -> int:
    """Prepare; the exit code. On failure one line says what to do."""
    args = _parser().parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar is enough
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("Starting", total=STEPS)

            def say(what: str) -> None:
                progress.update(task, description=what, advance=1)
                logger.info("action=prepare step=%r", what)

            prepare(
                args.model, args.out, max_model_len=args.max_model_len, dtype=args.dtype, say=say
            )
            progress.update(task, description="Ready", completed=STEPS)
    except OnlineSaoError as error:
        return running.fail(str(error))
    except OSError as error:
        return running.fail(f"{args.out} could not be written: {error}")
    return 0


def prepare(name: str, out: Path, *, max_model_len: int, dtype: str, say: Say) -> None:
    """Write version 0 of model `name` into the new folder `out`.

    Raises ModelError (no such model, not usable), OSError (disk full, no permission).
    """
    say("Loading torch and transformers")
    import torch

    from online_sao.engines.embedded import sources
    from online_sao.engines.embedded.weights import choose_dtype

    if out.exists():
        raise ModelError(f"{out} exists already")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say(f"Looking for {name}")
    source = sources.find(name)
    say(f"Reading {source.description}")
    model, tokenizer = sources.load(source)
    if not tokenizer.chat_template:
        raise ModelError(f"{name} has no chat template: choose an instruct or chat model")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < max_model_len:
        logger.warning(
            "action=context_shorter detail=%s has %d positions, not %d",
            name,
            positions,
            max_model_len,
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        say("Writing weights and tokenizer")
        model.to(choose_dtype(dtype, device))
        _write(model, tokenizer, draft)
        say("Computing probe tokens")
        _write_manifest(model, tokenizer, draft)
        say("Publishing")
        draft.chmod(0o755)
        _publish(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(model: Any, tokenizer: Any, draft: Path) -> None:
    from online_sao.engines.embedded.sources import eos_ids

    ends = eos_ids(model, tokenizer)
    if not ends:
        raise ModelError("no id ends a reply: neither the model nor its tokenizer names one")
    model.generation_config.eos_token_id = ends
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)


def _write_manifest(model: Any, tokenizer: Any, draft: Path) -> None:
    """Probe log-probabilities in fp32 from the very weights that were stored.

    The first tokens of a chat, then the model's own likeliest: half precision moves likely tokens
    least, while weights that are not these show at once.
    """
    import torch

    from online_sao.manifest import MANIFEST_NAME, Manifest
    from online_sao.types import ProbeTokens

    text = tokenizer.apply_chat_template(
        list(PROBE_CHAT), add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"][:PROBE_GIVEN]
    model.float()
    with torch.inference_mode():
        while len(ids) < PROBE_TOKENS:
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        scores = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    manifest = Manifest.describe(draft, ProbeTokens(tuple(ids), tuple(scores)))
    (draft / MANIFEST_NAME).write_text(manifest.to_json())


def _publish(draft: Path, out: Path) -> None:
    from online_sao.manifest import publish_folder

    for path in draft.iterdir():
        path.chmod(0o644)
    publish_folder(draft, out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="online_sao.engines.embedded.prepare", description=__doc__
    )
    parser.add_argument("--model", required=True, help="a local folder or a hub name")
    parser.add_argument("--out", type=Path, required=True, help="the version folder to make")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    return parser


if __name__ == "__main__":
    sys.exit(main())
