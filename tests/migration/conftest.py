"""The databases of the store's contract suite serve here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from store_world import postgres, sqlite_template

__all__ = ["postgres", "sqlite_template"]
