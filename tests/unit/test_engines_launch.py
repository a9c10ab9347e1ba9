"""The commands a supervisor starts engines with are ones that the engines take."""

from __future__ import annotations

import sys
from pathlib import Path

from online_sao.config import load_settings
from online_sao.engines.embedded.__main__ import _parser as embedded_parser
from online_sao.engines.launch import embedded_command, scripted_command
from online_sao.engines.scripted.__main__ import _parser as scripted_parser

SETTINGS = load_settings(
    overrides={
        "engine": {"dtype": "float32", "max_num_seqs": 9, "silence_s": 7.5},
        "policy": {"served_name": "ours", "max_model_len": 300},
    },
    environ={},
)


def test_the_embedded_command_carries_every_setting() -> None:
    command = embedded_command(SETTINGS, Path("/m"), 4, 9000, 2)
    assert command[:3] == [sys.executable, "-m", "online_sao.engines.embedded"]
    args = embedded_parser().parse_args(command[3:])
    assert (args.model, args.version, args.port, args.threads) == (Path("/m"), 4, 9000, 2)
    assert (args.host, args.served_name, args.dtype) == ("127.0.0.1", "ours", "float32")
    assert (args.max_num_seqs, args.max_model_len, args.silence_s) == (9, 300, 7.5)


def test_the_scripted_command_carries_what_the_double_knows() -> None:
    command = scripted_command(SETTINGS, Path("/m"), 4, 9000, 2)
    assert command[:3] == [sys.executable, "-m", "online_sao.engines.scripted"]
    args = scripted_parser().parse_args(command[3:])
    assert (args.version, args.port, args.served_name) == (4, 9000, "ours")
    assert (args.host, args.max_model_len, args.silence_s) == ("127.0.0.1", 300, 7.5)
