"""What the store brings into the serving process, and what it costs a chat."""

from __future__ import annotations

import subprocess
import sys


def test_the_store_loads_no_array_library() -> None:
    script = (
        "import sys, online_sao.store.sql, online_sao.store.memory, online_sao.store.migrate\n"
        "heavy = {'numpy', 'torch', 'transformers', 'safetensors', 'psycopg'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
