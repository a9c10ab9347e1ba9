"""`python -m online_sao.engines.embedded --model DIR --version N --port P`: one engine process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from pathlib import Path

from online_sao.engines import running
from online_sao.errors import OnlineSaoError


def main(argv: list[str] | None = None) -> int:
    """Load, serve, end. The exit code: 0 after SIGTERM, 2 when the model cannot be served."""
    args = _parser().parse_args(argv)
    # Before torch is loaded: waiting threads sleep, else two torch processes starve each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    running.set_up_logging()
    try:
        asyncio.run(_serve(args))
    except OnlineSaoError as error:
        return running.fail(str(error))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from transformers.utils import logging as transformers_logging

    from online_sao.engines.embedded.service import EmbeddedBackend, Options
    from online_sao.engines.server import build_app

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    sys.setswitchinterval(0.001)  # the decode thread gets the interpreter back sooner
    backend = EmbeddedBackend(
        Options(
            model=args.model,
            version=args.version,
            served_name=args.served_name,
            dtype=args.dtype,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            threads=args.threads,
            silence_s=args.silence_s,
        )
    )
    # What lives now lives for ever: later collections need not walk it, which would hold up
    # decoding by tenths of a second.
    gc.collect()
    gc.freeze()
    await running.serve(
        build_app(backend),
        host=args.host,
        port=args.port,
        started=backend.start,
        stopped=backend.stop,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="online_sao.engines.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="version folder to serve")
    parser.add_argument("--version", type=int, required=True, help="its number")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-name", default="online-sao")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="replies decoded at once")
    parser.add_argument("--max-model-len", type=int, default=2048, help="prompt and reply, tokens")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument(
        "--silence-s", type=float, default=30.0, help="a paused engine goes on after this silence"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
