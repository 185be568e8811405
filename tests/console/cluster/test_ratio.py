"""`baton ratio` and `baton role`: what is printed of what the router said."""

import msgspec
from rich.console import Console
from typer.testing import CliRunner

from baton.cluster.advice import Advice, RatioPin, RatioPoint, TimelineEntry, TwinError
from baton.console.cluster.ratio import page
from baton.console.main import app


def shown(**fields) -> str:
    found = {"prefill": 3, "decode": 5, "workers": {}, "pin": None, "advice": None, "timeline": []} | fields
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in page(found):
        console.print(part)
    return console.export_text()


def test_the_ratio_is_shown_even_where_no_controller_speaks():
    assert "3:5" in (text := shown())
    assert "it is off" in text


def test_the_dial_shows_where_one_is_and_the_plateau():
    points = tuple(RatioPoint(p, 8 - p, p / 10, 0.9, 1.0, 0.05) for p in range(1, 8))
    advice = Advice(1.0, "auto", 3, 5, "it says why", (4, 4), (3, 5), (4, 5), points, (0.9, 0.2), TwinError(0.1))
    text = shown(advice=msgspec.to_builtins(advice), pin=msgspec.to_builtins(RatioPin(3, 5, by="ada")))
    rows = [line for line in text.splitlines() if "ms" in line]
    assert len(rows) == 7
    assert ["you are here" in r for r in rows].index(True) == 2
    assert ["plateau" in r for r in rows] == [False, False, False, True, True, False, False]
    assert "best now 4:4" in text
    assert "pinned by ada" in text
    assert "ttft +10%" in text


def test_withheld_advice_says_why_and_the_timeline_is_there():
    advice = Advice(1.0, "auto", 3, 5, "no", withheld="the twin is off by 90%")
    change = TimelineEntry(1.0, "rerole", (3, 5), (4, 4), "prefill was [full]", ("decode-1",), 0.2, "ada")
    text = shown(advice=msgspec.to_builtins(advice), timeline=[msgspec.to_builtins(change)])
    assert "advice withheld: the twin is off by 90%" in text
    assert all(word in text for word in ("rerole", "3:5", "4:4", "0.20", "prefill was [full]"))


def test_where_no_router_answers_is_one_line_and_a_failing_status():
    done = CliRunner().invoke(app, ["ratio", "show", "--url", "http://127.0.0.1:9"])
    assert (done.exit_code, "no router answers" in done.output) == (1, True)


def test_a_change_that_takes_long_is_shown_with_what_it_waits_for():
    change = {
        "worker": "prefill-1",
        "before": "prefill",
        "after": "decode",
        "seconds": 42.4,
        "waits_for": "it [loads]",
    }
    assert "prefill-1 becomes a decode worker, for 42 s now: it [loads]" in shown(changing=[change])
