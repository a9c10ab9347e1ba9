"""The learner: claims judged trajectories, does SAO updates, writes policy versions.

Importing this package loads no torch; `trainer`, `models` and their parts do.
"""
