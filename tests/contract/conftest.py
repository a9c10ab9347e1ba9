"""Fixtures of the contract suites."""

from store_world import postgres, sql_world, sqlite_template, world

__all__ = ["postgres", "sql_world", "sqlite_template", "world"]
