"""One row in every table, in plain SQL, as it stood at each revision.

A new revision adds its own function here; the ones before stay as they are.
"""

from __future__ import annotations

import re

import sqlalchemy as sa

WHEN = "2026-01-01 00:00:00.000000"


def fill_0001(connection: sa.Connection) -> None:
    """A trained rollout with all that hangs off it, and one in flight."""
    rows = [
        "INSERT INTO ledger_entries (rollout_id, created_at, state, reason, feedback_came, "
        f"judgement_seq) VALUES ('r1', '{WHEN}', 'trained', '', FALSE, 1)",
        "INSERT INTO ledger_entries (rollout_id, created_at, state, reason, feedback_came) "
        f"VALUES ('r2', '{WHEN}', 'in_flight', '', FALSE)",
        "UPDATE counters SET value = 2 WHERE name = 'requests'",
        "INSERT INTO rollouts (id, created_at, session_id, stream, train, sampling, messages, "
        "completed_at, outcome, finish_reason, engine, version_spans, prompt_tokens, "
        f"reply_tokens, text, prompt_ids, reply_ids, logprobs) VALUES ('r1', '{WHEN}', 's', "
        'FALSE, TRUE, \'{"temperature":0.5}\', \'[{"role":"user","content":"Hi"}]\', '
        f"'{WHEN}', 'completed', 'stop', 'boot-1', '[[0,0,1]]', 1, 1, 'Hello', "
        "{01000000}, {02000000}, {000000000000e0bf})",
        "INSERT INTO rollouts (id, created_at, session_id, stream, train, sampling, messages) "
        f"VALUES ('r2', '{WHEN}', 's', FALSE, TRUE, '{{}}', '[]')",
        "INSERT INTO feedback (id, rollout_id, created_at, metric, value, source, client_id) "
        f"VALUES ('fb_1', 'r1', '{WHEN}', 'thumbs', 'true', 'api', 'c1')",
        "INSERT INTO rubric_versions (id, name, number, judge, criteria, created_at, message, "
        f"author) VALUES ('rub_1', 'tone', 1, 'a:J', '{{}}', '{WHEN}', '', '')",
        "INSERT INTO rubric_labels (label, rubric_id) VALUES ('active', 'rub_1')",
        "INSERT INTO judgements (id, rollout_id, created_at, rubric_id, judge, state, quality, "
        f"style, reward, reason, latency_s, attempts) VALUES ('jdg_1', 'r1', '{WHEN}', 'rub_1', "
        "'a:J', 'scored', 1, 1, 1.0, '', 0.1, 1)",
        "INSERT INTO policy_versions (number, parent, path, sha256, state, created_at, gate) "
        f"VALUES (0, NULL, 'base', 'aa', 'retired', '{WHEN}', 'passed')",
        "INSERT INTO policy_versions (number, parent, path, sha256, state, created_at, gate, "
        f"published_at, delivery) VALUES (1, 0, 'v1', 'bb', 'live', '{WHEN}', 'passed', "
        f"'{WHEN}', '{{}}')",
        "INSERT INTO updates (id, created_at, kind, metrics, version, note) "
        f"VALUES ('upd_1', '{WHEN}', 'policy', '{{\"loss\":0.5}}', 1, '')",
        "INSERT INTO update_members (rollout_id, update_seq, position) VALUES ('r1', 1, 0)",
        "INSERT INTO token_traces (rollout_id, trace_values, advantages, ratios, kept) "
        "VALUES ('r1', {0000003f}, {0000003f}, {0000803f}, {01})",
        f"INSERT INTO notes (key, value, updated_at) VALUES ('n', '{{}}', '{WHEN}')",
        "INSERT INTO alarms (name, message, since, times) "
        f"VALUES ('swap_failed', 'why', '{WHEN}', 2)",
        f"INSERT INTO lost_leases (owner, lost_at) VALUES ('dead', '{WHEN}')",
    ]
    for row in rows:
        connection.exec_driver_sql(_spelled(row, connection.dialect.name))


def fill_0002(connection: sa.Connection) -> None:
    """The same, the trained rollout in a closed tool episode."""
    fill_0001(connection)
    rows = [
        "INSERT INTO episodes (id, created_at, last_active_at, closed_at, rewards, judged_id, "
        f"head_id) VALUES ('ep_1', '{WHEN}', '{WHEN}', '{WHEN}', 'one', 'r1', 'r1')",
        "UPDATE ledger_entries SET episode_id = 'ep_1' WHERE rollout_id = 'r1'",
    ]
    for row in rows:
        connection.exec_driver_sql(_spelled(row, connection.dialect.name))


def _spelled(statement: str, dialect: str) -> str:
    """`{0102}` as the dialect writes two bytes; times with their zone on PostgreSQL."""
    quote = "x'" if dialect == "sqlite" else "'\\x"
    statement = re.sub(r"\{((?:[0-9a-f]{2})+)\}", lambda match: f"{quote}{match[1]}'", statement)
    return statement.replace(WHEN, WHEN + "+00") if dialect == "postgresql" else statement


FILLINGS = {"0001": fill_0001, "0002": fill_0002}
