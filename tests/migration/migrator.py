"""A process that migrates when told: python migrator.py URL."""

from __future__ import annotations

import logging
import sys

from online_sao.store.migrate import migrate

logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
sys.stdout.write("ready\n")
sys.stdout.flush()
sys.stdin.readline()
sys.stdout.write(migrate(sys.argv[1]) + "\n")
