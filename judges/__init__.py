"""Judges: each scores single replies behind one seam, `online_sao.interfaces.Judge`."""
