"""The shipped double: an engine without a model, in process or as a server of the same protocol.

Its tokens are bytes and whole words; its replies are put together from a small vocabulary by the
prompt, the temperature and the seed, at a settable rate. What can go wrong with a real engine can
be switched on in `Faults`.
"""

from online_sao.engines.scripted.backend import Faults, ScriptedBackend
from online_sao.engines.scripted.engine import ScriptedEngine

__all__ = ["Faults", "ScriptedBackend", "ScriptedEngine"]
