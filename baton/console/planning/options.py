"""The options that `baton plan`, `sim` and `size` have in common, in groups, and what is read by them.

Knows nothing of how anything is simulated.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from baton.console.cluster.asking import RouterEndpoint
from baton.protos.errors import ConfigError
from baton.protos.json import Json

if TYPE_CHECKING:  # loaded by the command that needs them
    from baton.planner.costs.adapters import AdapterCosts
    from baton.planner.costs.measured_forms import MeasuredForm
    from baton.planner.score import Slo
    from baton.planner.traces.trace import Trace

TraceFlag = Annotated[str, typer.Option(help="A .jsonl (Mooncake) or .csv (Azure) file")]
WantFlag = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that must meet the SLOs")]
PolicyFlag = Annotated[str, typer.Option(help="Routing policy")]
AdapterCostFlag = Annotated[
    str,
    typer.Option(
        help="LoRA adapters: how many times as long a step takes whose tokens are all on them, as 1.2; or the URL "
        "of a router, whose workers' measurements are taken (key: BATON_API_KEY); default: the profile's [adapters]"
    ),
]
AcceptanceFlag = Annotated[
    str,
    typer.Option(
        help="Speculation: chances that drafted tokens stand, by position, as 0.8,0.6,0.5; or the URL of a router, "
        "whose workers' own are taken (key: BATON_API_KEY)"
    ),
]
MaxBatchFlag = Annotated[int, typer.Option(min=1, help="Sequences in one step of a worker: worker.max_batch")]
SeedFlag = Annotated[int, typer.Option(help="Same seed, same answer")]
JsonFlag = Annotated[str | None, typer.Option("--json", help="Write the result there; - prints it")]


@dataclass(frozen=True)
class SloOptions:
    """Holds the service-level objectives of a request."""

    ttft: Annotated[float, typer.Option("--ttft", min=0.001, help="SLO: seconds to the first token")] = 10.0
    tpot: Annotated[float, typer.Option("--tpot", min=0.0001, help="SLO: seconds per token after it")] = 0.1

    @property
    def slo(self) -> Slo:
        """Returns the service-level objective that the planner judges by."""
        from baton.planner.score import Slo

        return Slo(self.ttft, self.tpot)


@dataclass(frozen=True)
class PartOptions:
    """Says which part of a trace is played, and how fast."""

    speed: Annotated[float, typer.Option(min=0.001, help="Replay the trace this much faster")] = 1.0
    start: Annotated[float, typer.Option("--from", min=0.0, help="Seconds into the trace to begin at")] = 0.0
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of the trace to take; 0: all")] = 0.0

    def read(self, trace: str) -> Trace:
        """Returns the part of the file ``trace``. Raises ConfigError for fewer than 2 requests, and TraceError."""
        from baton.planner.traces.trace import read_trace

        start = self.start
        part = read_trace(trace, False).between(start, start + self.seconds if self.seconds else float("inf"))
        if (count := len(part.requests)) < 2:
            raise ConfigError(f"{trace} has {count} requests from second {start:g} on; take more", "trace")
        return part.faster(self.speed)


@dataclass(frozen=True)
class MeasuredOptions:
    """Names a measurement of forms of weights and KV, and the most loss that is allowed."""

    measured: Annotated[
        str | None,
        typer.Option(
            help="JSON of baton evaluate --sweep: what forms of weights and KV lose and how fast they are"
        ),
    ] = None
    most_loss: Annotated[
        float, typer.Option(min=0.0, help="With --measured: the most loss of a form, as a share")
    ] = 0.01

    def require_allowed(self, profiles: Sequence[str]) -> list[str]:
        """Returns sentences about the measured loss and speed of the forms that roofline profiles name.

        Raises ConfigError for a form that loses more than ``most_loss`` (a share), or was not measured.
        """
        from baton.planner.costs.measured_forms import MeasuredForms
        from baton.planner.costs.roofline_name import OPTIONS, is_roofline, parse

        if self.measured is None:
            return []
        sweep, found = MeasuredForms.read(self.measured), []
        for name in (name for name in profiles if is_roofline(name)):
            of = parse(name)
            settings = {key: getattr(of, key) for key in OPTIONS}
            if why := sweep.refusal(settings, self.most_loss):
                raise ConfigError(f"{name}: {why}: sweep it as well, or raise --most-loss", "most_loss")
            if (row := sweep.of(settings)) is not None:
                found.append(self.words(row))
        return list(dict.fromkeys(found))

    def words(self, row: MeasuredForm) -> str:
        """Returns the measured loss and speed of a form as a sentence."""
        speed = f"{row.decode_one:,.0f} tok/s alone, {row.decode_many:,.0f} of 16"
        loss = f"{row.scheme} loses {row.added:.3%} ({row.low:.3%} to {row.high:.3%})"
        return f"{loss}; {speed} where {self.measured} was measured"


def adapter_costs_from(text: str) -> AdapterCosts:
    """Returns the costs of adapters that --adapter-cost says: a factor, those of the router whose URL it is, or for
    "" each profile's own.

    Raises ConfigError.
    """
    from baton.planner.costs.adapters import AdapterCosts, measured_by, parse_factor

    if not text.startswith(("http://", "https://")):
        return AdapterCosts(parse_factor(text) if text else None)
    return AdapterCosts(measured=measured_by(_cluster(text, "--adapter-cost")))


def acceptance_from(text: str) -> tuple[float, ...]:
    """Returns the acceptance probabilities by draft position that --acceptance lists, or those of the router whose
    URL it is.

    Raises ConfigError.
    """
    from baton.planner.costs.speculation import acceptance_of, parse_acceptance

    if not text.startswith(("http://", "https://")):
        return parse_acceptance(text)
    return acceptance_of(_cluster(text, "--acceptance"))


def _cluster(url: str, option: str) -> Json:
    """Returns what the router at ``url`` says of its cluster. Raises ConfigError naming ``option``."""
    remedy = f"write the URL of a router behind {option}, or numbers"
    found = RouterEndpoint(url, os.environ.get("BATON_API_KEY", ""), remedy=remedy).call("GET", "/v1/cluster")
    if not isinstance(found, dict) or not isinstance(found.get("workers"), list):
        raise ConfigError(f"what answers at {url} is no router; {remedy}", option.lstrip("-").replace("-", "_"))
    return found
