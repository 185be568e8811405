"""``baton explain ID``: a request's record, as a page to read.

Knows nothing of policies; it shows what the router wrote down.
"""

from __future__ import annotations

import json
import ssl
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.cluster.config import BatonConfig
from baton.console.workers import newest_config
from baton.deploy.security import probing_context
from baton.protos.errors import BatonError, ConfigError, RequestUnknown

TIMEOUT_S = 5.0


def show(request_id: str, url: str | None, key: str, as_json: bool) -> int:
    """Ask the router, print. Raises RequestUnknown, ConfigError."""
    if url:
        record = fetch(request_id, url, key)
    else:
        config = newest_config(Path(tempfile.gettempdir()))
        record = fetch(request_id, url_of(config), key, probing_context(config))
    console = Console(highlight=False, width=140)
    if as_json:
        print(json.dumps(record, indent=1))
    else:
        page(record, console)
    return 0


def fetch(request_id: str, url: str, key: str, context: ssl.SSLContext | None = None) -> dict[str, Any]:
    """The record. For an https:// URL without a ``context`` $SSL_CERT_FILE may name the CA."""
    path = f"{url.rstrip('/')}/v1/requests/{urllib.parse.quote(request_id, safe='')}/explain"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(path, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as response:
            found: dict[str, Any] = json.load(response)
            return found
    except urllib.error.HTTPError as error:
        raise _refused(error) from None
    except OSError as error:
        raise ConfigError(f"no router answers at {url} ({error}); pass --url", "url") from None


def page(record: dict[str, Any], console: Console) -> None:
    """Who, then for each choice: every placement with its candidates, then predicted against observed."""
    who = f"{record['request_id']}: {record['model']}, {record['prompt_tokens']} prompt tokens"
    tenant = f", tenant {record['tenant']}" if record["tenant"] else ""
    session = f", session {record['session']}" if record.get("session") else ""
    console.print(f"[bold]{who}[/], class {record['context_class']}{tenant}{session}, {record['state']}")
    for choice in record["choices"]:
        end = choice["error"] or choice["finish_reason"] or "running"
        console.print(
            f"\nchoice {choice['choice']}: {choice['completion_tokens']} tokens, {choice['cached_tokens']} cached, "
            f"attempt {choice['attempts']}, {end}"
        )
        for placement in choice["placements"]:
            console.print(_candidates(placement))
        if choice["predicted_against_observed"]:
            console.print(_compared(choice["predicted_against_observed"]))


def _candidates(placement: dict[str, Any]) -> Table:
    """The option taken first, then the roads not taken."""
    title = f"after {placement['at_s']:.4f} s ({placement['waited_s']:.4f} s queued), by {placement['policy']}"
    if placement["left_for"]:
        title += f"; left for {placement['left_for']}"
    table = Table(box=None, title=title, title_justify="left")
    options = [placement["taken"], *placement["not_taken"]]
    terms = list(dict.fromkeys(term for option in options for term in option["terms"]))
    for column in ("", "way", "prefill", "decode", "cached", *terms, "cost"):
        table.add_column(column, no_wrap=True)
    for at, option in enumerate(options):
        values = [f"{option['terms'][t]:.4f}" if t in option["terms"] else "" for t in terms]
        table.add_row(
            "" if at else "taken",
            option["way"],
            option["prefill"],
            option["decode"],
            str(option["cached_tokens"]),
            *values,
            f"{option['cost']:.4f}",
        )
    if placement["not_listed"]:
        table.add_row("", f"and {placement['not_listed']} more")
    return table


def _compared(compared: dict[str, dict[str, float | None]]) -> Table:
    table = Table(box=None)
    for column in ("seconds", "predicted", "observed"):
        table.add_column(column, no_wrap=True)
    for name, row in compared.items():
        shown = ["" if row[k] is None else f"{row[k]:.4f}" for k in ("predicted_s", "observed_s")]
        table.add_row(name, *shown)
    return table


def _refused(error: urllib.error.HTTPError) -> BatonError:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {error.code}"
    return RequestUnknown(message)


def url_of(config: BatonConfig) -> str:
    """Where its router answers, from this machine."""
    router, scheme = config.router, "https" if config.tls.enabled else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(router.host, router.host)
    return f"{scheme}://{host}:{router.port}"
