"""``baton explain [ID]``: prints a request's decision record, by default of the request that ended last.

Knows nothing of policies; it shows what the router recorded.
"""

from __future__ import annotations

import json
import urllib.parse

from rich.console import Console
from rich.table import Table

from baton.console.cluster.asking import RouterEndpoint, router
from baton.console.cluster.ranks import ranks_in_words
from baton.console.output import results, whole
from baton.protos.errors import RequestUnknown
from baton.protos.json import Json


def show(request_id: str, url: str | None, key: str, as_json: bool) -> int:
    """Asks the router for the record and prints it, as a page or as JSON; returns 0.

    An empty ``request_id`` stands for the request that ended last, which needs an admin's key where keys are asked
    for. Raises RequestUnknown, ConfigError.
    """
    endpoint = router(url, key)
    path = f"/v1/requests/{urllib.parse.quote(request_id or _last(endpoint), safe='')}/explain"
    record = endpoint.call("GET", path)
    if as_json:
        print(json.dumps(record, indent=1))
    else:
        page(record, results())
    return 0


def _last(endpoint: RouterEndpoint) -> str:
    """Returns the id of the request that ended last."""
    ended = endpoint.call("GET", "/v1/cluster")["recent"]
    if not ended:
        raise RequestUnknown("no request has ended here yet: name one by its id", "request_id")
    return str(max(ended, key=lambda each: each["at"])["request_id"])


def page(record: Json, console: Console) -> None:
    """Prints a decision record to ``console``: the request, every choice's placements with their candidates, then
    predicted against observed seconds.
    """
    console.print(f"[bold]{record['request_id']}[/]: {_asked(record)}")
    for choice in record["choices"]:
        end = choice["error"] or choice["finish_reason"] or "running"
        console.print(
            f"\nchoice {choice['choice']}: {choice['completion_tokens']} tokens, {choice['cached_tokens']} cached, "
            f"{_drafts(choice)}{_attempts(choice['attempts'])}, {end}"
        )
        for placement in choice["placements"]:
            console.print(_placed(placement))
            for worker, ranks in placement.get("ranks", {}).items():
                console.print(f"{worker}: {ranks_in_words(ranks['widths'], ranks['hosts'])}")
            console.print(whole(_candidates(placement)))
        if seen := choice.get("observed_s"):
            stations = ", ".join(f"{name} {seconds:.4f}" for name, seconds in seen.items())
            console.print(f"observed seconds: {stations}")
        if choice["predicted_against_observed"]:
            console.print(_compared(choice["predicted_against_observed"]))
    policies = {placement["policy"] for choice in record["choices"] for placement in choice["placements"]}
    for policy in sorted(policies):
        console.print(
            f"\n[dim]Columns after `cached` are the policy's terms: baton/router/policies/{policy}.md.[/]"
        )


def _asked(record: Json) -> str:
    """Returns in words what the request asked for, and who sent it, as far as the record has it."""
    slo = record.get("slo", {})
    parts = [
        record["model"] + (f" with adapter {record['adapter']}" if record.get("adapter") else ""),
        f"{record['prompt_tokens']} prompt tokens",
        f"at most {record['max_tokens']} to write" if record.get("max_tokens") else "",
        f"class {record['context_class']}",
        f"tenant {record['tenant']}" if record["tenant"] else "",
        f"session {record['session']}" if record.get("session") else "",
        f"x-request-id {record['asked_id']}" if record.get("asked_id") else "",
        f"first token wanted within {slo['ttft_s']:g} s" if slo.get("ttft_s") else "",
        f"{slo['tpot_s']:g} s wanted between tokens" if slo.get("tpot_s") else "",
        record["state"],
    ]
    return ", ".join(part for part in parts if part)


def _attempts(count: int) -> str:
    return "never placed" if not count else f"{count} attempt{'s' if count > 1 else ''}"


def _drafts(choice: Json) -> str:
    accepted, rejected = choice.get("accepted_drafts", 0), choice.get("rejected_drafts", 0)
    if not accepted and not rejected:
        return ""
    steps = max(1, choice["completion_tokens"] - accepted)
    pace = choice["completion_tokens"] / steps
    return f"{accepted} of {accepted + rejected} drafts accepted ({pace:.2f} tokens a step), "


def _placed(placement: Json) -> str:
    """Returns in words when and by which policy a choice was placed, on whose weights, and why it left."""
    text = f"after {placement['at_s']:.4f} s ({placement['waited_s']:.4f} s queued), by {placement['policy']}"
    if placement.get("weights"):
        text += f", weights {placement['weights']}"
    if placement["left_for"]:
        text += f"; given up because of {placement['left_for']}"
    return text


def _candidates(placement: Json) -> Table:
    """The option taken first, then the roads not taken."""
    table = Table(box=None)
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
