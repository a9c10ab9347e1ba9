"""Online learning for a served chat model, from single judged replies (SAO)."""

__version__ = "0.1.0"
