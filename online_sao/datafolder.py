"""The data folder: where everything lies, who may run on it, and its admin key.

DIR/online-sao.db     the database (SQLite)
DIR/admin.key         the admin key, mode 600
DIR/lock              held while a service runs
DIR/model/            version 0: the starting policy, converted once
DIR/versions/ID/      one folder a version, immutable
DIR/learner/ID/       the learner's full state, the last two
DIR/run/settings.toml what the running service was started with
DIR/logs/             the children's output
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from online_sao.errors import ConfigError, DataFolderInUse

KEY_PREFIX = "sk-sao-"


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths below one data folder. Makes nothing until `create`."""

    root: Path

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the embedded database."""
        return f"sqlite:///{self.root.resolve() / 'online-sao.db'}"

    @property
    def model(self) -> Path:
        """Version 0."""
        return self.root / "model"

    @property
    def versions(self) -> Path:
        """Where the learner publishes."""
        return self.root / "versions"

    @property
    def learner_states(self) -> Path:
        """Where the learner keeps its own state."""
        return self.root / "learner"

    @property
    def logs(self) -> Path:
        """The children's output."""
        return self.root / "logs"

    @property
    def running_settings(self) -> Path:
        """What the running service was started with; its children read it."""
        return self.root / "run" / "settings.toml"

    @property
    def key_file(self) -> Path:
        """The admin key."""
        return self.root / "admin.key"

    def create(self) -> None:
        """Make the folders that are missing. Raises ConfigError if they cannot be made."""
        for folder in (self.versions, self.learner_states, self.logs, self.running_settings.parent):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot make {folder}: {error.strerror}") from error

    def exists(self) -> bool:
        """True when a service has run here before."""
        return (self.root / "online-sao.db").exists() or self.running_settings.exists()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for one service. Raises DataFolderInUse if another has it.

        The kernel drops the lock with the process, however it dies.
        """
        path = self.root / "lock"
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise DataFolderInUse(
                    f"{self.root} is in use by process {owner}: stop that service, "
                    "or choose another folder with --data"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def read_key(self) -> str | None:
        """The stored admin key, if there is one."""
        try:
            return self.key_file.read_text().strip() or None
        except FileNotFoundError:
            return None

    def ensure_key(self, given: str | None) -> tuple[str, bool]:
        """The admin key to use, and whether it was made just now (then it is to be printed once).

        A given key wins and is written down, so that `online-sao chat` finds it.
        """
        stored = self.read_key()
        if given is None and stored is not None:
            return stored, False
        key = given if given is not None else KEY_PREFIX + secrets.token_urlsafe(32)
        if key != stored:
            self._write_key(key)
        return key, given is None

    def _write_key(self, key: str) -> None:
        draft = self.key_file.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
        os.replace(draft, self.key_file)
