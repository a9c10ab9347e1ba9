"""What a person sees in the terminal: the chat, the live status, the ledger."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.prompt import Prompt
from rich.table import Table
from rich.text import Text

from online_sao.errors import ConfigError, EngineError
from online_sao.interfaces import Store
from online_sao.types import Ledger, LedgerState, PolicyVersion

REFRESH_S = 1.0
RECENT_UPDATES = 5
CHAT_TIMEOUT_S = 600.0
THUMBS = {"+": True, "-": False}
YOU = "[bold cyan]you[/]"


# -- chat ----------------------------------------------------------------------------------------


def chat(base_url: str, key: str) -> None:
    """A conversation; after each reply + or - rates it, Enter goes on, an empty line ends.

    Raises ConfigError (nobody answers) and EngineError (the service refused).
    """
    console = Console()
    console.print(
        f"Chatting with {escape(base_url)}. After a reply: [bold]+[/] or [bold]-[/] rates it, "
        "Enter goes on. An empty message ends, /new starts over."
    )
    messages: list[dict[str, str]] = []
    with _client(base_url, key) as client:
        model = _first_model(client)
        text = _ask(console, YOU)
        while text:
            said = ""
            if text == "/new":
                messages = []
            else:
                said = _turn(client, console, model, messages, text)
            text = said or _ask(console, YOU)


def _client(base_url: str, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    try:
        return httpx.Client(base_url=base_url, headers=headers, timeout=CHAT_TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url!r} is no URL: {error}") from error


def _turn(
    client: httpx.Client,
    console: Console,
    model: str,
    messages: list[dict[str, str]],
    text: str,
) -> str:
    """One message, its reply, perhaps a thumb; what was typed instead of a thumb."""
    messages.append({"role": "user", "content": text})
    reply, sao = _one_reply(client, console, model, messages)
    messages.append({"role": "assistant", "content": reply})
    console.print(f"[dim]{escape(_describe(sao))}[/]")
    said = _ask(console, "[dim]+ / - / Enter[/]")
    thumb = THUMBS.get(said)
    if thumb is None:
        return said
    _rate(client, console, str(sao.get("inference_id")), thumb)
    return ""


def _ask(console: Console, label: str) -> str:
    try:
        return Prompt.ask(label, console=console, default="", show_default=False).strip()
    except EOFError:
        return ""


def _first_model(client: httpx.Client) -> str:
    listed = _json(client, "GET", "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise _not_ours(client) from None


def _one_reply(
    client: httpx.Client, console: Console, model: str, messages: list[dict[str, str]]
) -> tuple[str, dict[str, Any]]:
    """Stream one reply to the console; its text and what the service says of it."""
    body = {"model": model, "messages": messages, "stream": True}
    parts: list[str] = []
    sao: dict[str, Any] = {}
    console.print(f"[bold green]{escape(model)}[/]: ", end="")
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise EngineError(_error_message(response))
            for chunk in _events(response):
                if "error" in chunk:
                    raise EngineError(chunk["error"]["message"])
                sao.update(chunk.get("sao") or {})
                for choice in chunk["choices"]:
                    text = choice["delta"].get("content") or ""
                    parts.append(text)
                    console.print(_inert(text), end="", soft_wrap=True)
    except httpx.HTTPError as error:
        raise EngineError(f"the service does not answer: {error}") from error
    finally:
        console.print()
    return "".join(parts), sao


def _inert(text: str) -> Text:
    """Text that is shown and does nothing: neither markup nor the terminal's escape sequences."""
    return Text("".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc"))


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


def _describe(sao: dict[str, Any]) -> str:
    learns = "can be learned from" if sao.get("trainable") else "not learned from"
    reason = f" ({sao['trainable_reason']})" if sao.get("trainable_reason") else ""
    return f"policy version {sao.get('policy_version')}, {learns}{reason}"


def _rate(client: httpx.Client, console: Console, inference_id: str, thumb: bool) -> None:
    body = {"inference_id": inference_id, "metric_name": "thumbs", "value": thumb}
    answer = _json(client, "POST", "/v1/feedback", body)
    console.print(f"[dim]{'+' if thumb else '-'} {answer['status']}[/]")


def _json(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        response = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"no service answers at {client.base_url}: start one with `online-sao up` ({error})"
        ) from error
    if response.is_error:
        raise EngineError(_error_message(response))
    try:
        data: dict[str, Any] = response.json()
    except ValueError:
        raise _not_ours(client) from None
    return data


def _not_ours(client: httpx.Client) -> ConfigError:
    return ConfigError(f"what answers at {client.base_url} is not online-sao")


def _error_message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the service answered {response.status_code}"


# -- status --------------------------------------------------------------------------------------


async def read_status(store: Store) -> dict[str, Any]:
    """Everything `status` shows, as plain JSON."""
    live = await store.live_version()
    rewards = await store.reward_stats()
    updates = await store.list_updates(limit=RECENT_UPDATES)
    return {
        "live_version": None if live is None else live.number,
        "unpublished": await store.unpublished(),
        "learner": await store.get_note("learner_heartbeat"),
        "learner_paused": bool((await store.get_note("learner") or {}).get("paused")),
        "last_swap": await store.get_note("last_swap"),
        "reward": {"count": rewards.count, "mean": rewards.mean},
        "updates": [
            {
                "created_at": update.created_at.isoformat(),
                "kind": update.kind.value,
                "version": update.version,
                "note": update.note,
                "metrics": dict(update.metrics),
            }
            for update in updates
        ],
        "alarms": [
            {"name": a.name, "message": a.message, "since": a.since.isoformat(), "count": a.count}
            for a in await store.alarms()
        ],
        "ledger": ledger_json(await store.ledger()),
    }


async def watch_status(store: Store, console: Console) -> None:
    """Redraw the status until Ctrl-C."""
    with Live(console=console, auto_refresh=False, screen=False) as live:
        try:
            while True:
                live.update(status_view(await read_status(store)), refresh=True)
                await asyncio.sleep(REFRESH_S)
        except (KeyboardInterrupt, asyncio.CancelledError):
            return


def status_view(status: dict[str, Any]) -> RenderableType:
    """The status as a person reads it."""
    top = Table.grid(padding=(0, 2))
    learner = status["learner"] or {}
    state = "paused" if status["learner_paused"] else learner.get("state", "not started")
    reward = status["reward"]
    mean = "none yet" if reward["mean"] is None else f"{reward['mean']:.3f}"
    top.add_row("serving version", str(status["live_version"]))
    top.add_row("learner", f"{state}, {learner.get('updates', 0)} updates")
    top.add_row("reward, mean of all", f"{mean} ({reward['count']} judged)")
    parts: list[RenderableType] = [top, _updates_table(status["updates"])]
    for alarm in status["alarms"]:
        text = _inert(f"ALARM {alarm['name']}: {alarm['message']}")
        text.stylize("red")
        parts.append(text)
    parts.append(_counts_table(status["ledger"]))
    return Group(*parts)


def _updates_table(updates: list[dict[str, Any]]) -> Table:
    table = Table(title="latest updates", title_justify="left")
    for column in ("time (UTC)", "kind", "version", "reward", "EV", "clip", "KL", "note"):
        table.add_column(column)
    for update in updates:
        metrics = update["metrics"]
        table.add_row(
            update["created_at"][11:19],
            update["kind"],
            str(update["version"] if update["version"] is not None else "-"),
            *(
                _number(metrics.get(name))
                for name in ("reward_mean", "explained_variance", "clip_ratio", "kl_start")
            ),
            _inert(update["note"]),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# -- ledger and policies -------------------------------------------------------------------------


def ledger_json(book: Ledger) -> dict[str, Any]:
    """Counts, counts by reason, and whether they add up."""
    return {
        "requests": book.requests,
        "counts": {state.value: book.counts.get(state, 0) for state in LedgerState},
        "reasons": {state.value: dict(by) for state, by in book.reasons.items() if by},
        "adds_up": book.adds_up,
        "problems": list(book.problems),
    }


def ledger_view(book: Ledger) -> RenderableType:
    """The ledger as a table, with what does not add up below it."""
    verdict = Text("It adds up.") if book.adds_up else Text("It does NOT add up:", style="red")
    return Group(_counts_table(ledger_json(book)), verdict, *(Text(p) for p in book.problems))


def _counts_table(ledger: dict[str, Any]) -> Table:
    table = Table(title=f"{ledger['requests']} requests", title_justify="left")
    table.add_column("stands at")
    table.add_column("count", justify="right")
    table.add_column("by reason")
    for state, count in ledger["counts"].items():
        if count:
            by = ledger["reasons"].get(state, {})
            reasons = ", ".join(f"{reason} {n}" for reason, n in by.items())
            table.add_row(state, str(count), _inert(reasons))
    return table


def version_json(version: PolicyVersion) -> dict[str, Any]:
    """A policy version as plain JSON."""
    return {
        "number": version.number,
        "parent": version.parent,
        "state": version.state.value,
        "created_at": version.created_at.isoformat(),
        "sha256": version.sha256,
        "path": version.path,
        "gate": version.gate,
    }


def versions_view(versions: list[PolicyVersion]) -> Table:
    """The policy's versions, newest first."""
    table = Table()
    for column in ("version", "parent", "state", "made (UTC)", "sha256"):
        table.add_column(column)
    for version in versions:
        table.add_row(
            str(version.number),
            "-" if version.parent is None else str(version.parent),
            version.state.value,
            f"{version.created_at:%Y-%m-%d %H:%M:%S}",
            version.sha256[:12],
        )
    return table
