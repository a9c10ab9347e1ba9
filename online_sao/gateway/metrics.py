"""Every metric with its sentence. A registry of its own per app; nothing is labelled by user,
session, key or version (the served version is a gauge's value)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_REPLY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Metrics:
    """What the gateway counts. `outcome`, `reason`, `state`, `kind`, `status` are short lists."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.responses = Counter(
            "sao_http_responses", "HTTP answers by status.", ["status"], registry=registry
        )
        self.chats = Counter(
            "sao_chats",
            "Chats by outcome: completed, aborted, failed, refused (4xx), rejected (no place).",
            ["outcome"],
            registry=registry,
        )
        self.not_trainable = Counter(
            "sao_not_trainable",
            "Replies served that are not trained on, by reason.",
            ["reason"],
            registry=registry,
        )
        self.tokens = Counter(
            "sao_tokens", "Tokens by kind: prompt, reply.", ["kind"], registry=registry
        )
        self.first_token = Histogram(
            "sao_first_token_seconds",
            "From the request's admission to the reply's first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.reply = Histogram(
            "sao_reply_seconds",
            "From the request's admission to the end of a completed reply.",
            buckets=_REPLY_BUCKETS,
            registry=registry,
        )
        self.feedback = Counter(
            "sao_feedback",
            "Feedback by status: accepted, duplicate, already_trained, pending.",
            ["status"],
            registry=registry,
        )
        self.late_dropped = Counter(
            "sao_late_writes_dropped",
            "Records and pending feedback given up after their last attempt.",
            registry=registry,
        )
        self.in_flight = Gauge("sao_in_flight", "Chats in flight.", registry=registry)
        self._add_gauges_of_the_scrape()

    def _add_gauges_of_the_scrape(self) -> None:
        registry = self.registry
        self.engine_up = Gauge("sao_engine_up", "1 if the engine answers.", registry=registry)
        self.database_up = Gauge("sao_database_up", "1 if the database answers.", registry=registry)
        self.served_version = Gauge(
            "sao_served_version", "Policy version the engine serves; -1: none.", registry=registry
        )
        self.rollouts = Gauge(
            "sao_rollouts", "Rollouts by state of the ledger.", ["state"], registry=registry
        )
        self.ledger_adds_up = Gauge(
            "sao_ledger_adds_up", "1 if every identity of the ledger holds.", registry=registry
        )
        self.alarms = Gauge("sao_alarms", "Open alarms.", registry=registry)

    def text(self) -> bytes:
        """The registry in Prometheus's text format."""
        return generate_latest(self.registry)
