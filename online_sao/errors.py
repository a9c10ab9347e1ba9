"""What can go wrong, named by the boundary it crossed.

    OnlineSaoError
      ConfigError                 a setting, an option or a rubric file
      ModelError                  a model that is missing or not the one expected
      VersionFolderError          a weights folder that is not whole
      StoreError                  the database
        DatabaseUnavailable
        DatabaseRevisionError     newer (or older) than this code
        DataFolderInUse
        LeaseLost                 somebody else owns the work now
        UnknownRecord             no row with that id
        VersionConflict           the expected state is not the present one
        EpisodeClosed             no more replies join this tool episode
      EngineError                 the serving engine
        EngineUnavailable         dead, starting, or unreachable
        EngineTimeout
        EngineRefused             the engine's own 4xx: the request was wrong
        SwapFailed                new weights were not taken
          WeightsNotDelivered     taken with a 200, yet not what was sent
      JudgeError                  a judge failed; never a reward
      RolloutRefused              a record that may not be trained on
      TrajectoryRefused           numbers that no update could take (also a ValueError)
      LearnerError                the learner
        UpdateNotFinite           NaN or inf; nothing was changed

Each is raised where the boundary is crossed and caught at boundaries only: the HTTP handlers,
the workers' loops, the command line.
"""

from __future__ import annotations


class OnlineSaoError(Exception):
    """Base of all errors this project raises on purpose. `str()` is one clear line."""


class ConfigError(OnlineSaoError):
    """A setting, option or rubric file that cannot be used; the message names the key."""


class ModelError(OnlineSaoError):
    """The policy's model is missing, unreadable, or not the one the data folder was made with."""


class VersionFolderError(OnlineSaoError):
    """A weights folder that is incomplete, or whose bytes are not what its manifest says."""


class StoreError(OnlineSaoError):
    """The database could not do what was asked."""


class DatabaseUnavailable(StoreError):
    """No connection within the time-out; worth a retry."""


class DatabaseRevisionError(StoreError):
    """The database's schema is not the one this code was written for."""


class DataFolderInUse(StoreError):
    """Another service runs on the same data folder."""


class LeaseLost(StoreError):
    """The lease ran out or was taken over; the work in hand must not be committed."""


class UnknownRecord(StoreError):
    """No record with that id."""


class VersionConflict(StoreError):
    """The record changed since it was read."""


class EpisodeClosed(StoreError):
    """The tool episode has been closed; a request can join it no more."""


class EngineError(OnlineSaoError):
    """The serving engine failed."""


class EngineUnavailable(EngineError):
    """The engine is dead, starting, or cannot be reached."""


class EngineTimeout(EngineError):
    """The engine did not answer in time."""


class EngineRefused(EngineError):
    """The engine answered 4xx: the request itself was wrong.

    `param` names the request's field where the engine said which; `code` is OpenAI's error code.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class SwapFailed(EngineError):
    """New weights were not taken; the old ones serve."""


class WeightsNotDelivered(SwapFailed):
    """The engine said yes, but what it serves is not what was sent."""


class JudgeError(OnlineSaoError):
    """A judge could not judge (timeout, 5xx, bad answer). The rollout is judged again later."""


class RolloutRefused(OnlineSaoError):
    """A rollout's record cannot be trained on; `reason` is a `NotTrainable` value."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class TrajectoryRefused(OnlineSaoError, ValueError):
    """A trajectory that cannot be made: no action, lengths that differ, a number not finite."""


class LearnerError(OnlineSaoError):
    """The learner could not do an update."""


class UpdateNotFinite(LearnerError):
    """A loss or gradient was NaN or inf; weights and optimizer state are untouched."""
