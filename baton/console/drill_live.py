"""``baton drill --live URL``: judges a running server by its answers, and prints a scorecard."""

from __future__ import annotations

import asyncio

import msgspec

from baton.drill.live.http import Unreachable
from baton.drill.live.judge import LiveJudge, LiveLoad, Scorecard
from baton.protos.errors import Unavailable

LivePlan = LiveLoad
SHOWN = 5  # findings of a kind that are printed
KINDS = {
    "foreign": "text of another prompt in an answer",
    "broken": "streams and answers that are no whole ones",
    "endless": "requests without an end",
    "unlike": "streams unlike the whole answer to the same question",
    "health": "health that isn't what requests see",
    "held": "requests that nobody waits for any more",
    "differs": "greedy answers that are others under load",
}


def judge_live(url: str, key: str, model: str, plan: LiveLoad, as_json: bool) -> int:
    """Judges the server at ``url`` under the load ``plan`` and prints the findings; returns 1 if an answer or
    stream was wrong.

    Raises Unavailable if it can't be reached.
    """
    try:
        card = asyncio.run(LiveJudge(url, key, model, plan).run())
    except Unreachable as error:
        raise Unavailable(f"--live {url}: {error}", "live") from None
    if as_json:
        print(msgspec.json.encode(card).decode())
    else:
        _show(card)
    return 0 if card.passed else 1


def _show(card: Scorecard) -> None:
    print(
        f"{card.requests} requests: {card.answered} answered well, {card.refused} refused or failed; "
        f"{card.random_alone} questions whose answers differ alone as well"
    )
    for kind, words in KINDS.items():
        found: list[str] = getattr(card, kind)
        print(f"{len(found):6}  {words}")
        for text in found[:SHOWN]:
            print(f"        {text}")
    if card.killed:
        print(f"killed {card.killed}; answered again {card.recovered_s:.1f} s after the load")
    if card.missing:
        print(f"{card.missing} were to be killed and had ended by themselves, or never were")
    print("passed" if card.passed else "failed")
    if card.passed and card.differs:
        print("what differs may be arithmetic in batches of other sizes, where a server promises no more")
