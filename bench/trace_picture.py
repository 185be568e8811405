"""Draw one disaggregated request from its own trace: docs/figures/trace.svg.

    .venv/bin/python bench/trace_picture.py [--prompt-tokens 1200] [--out docs/figures/trace.svg]

Starts a cluster that exports OTLP to a receiver in this process, sends a few warm-up requests and one long
prompt, and draws the spans as they arrived. Spans of different processes are placed by their wall clocks
(one machine, one clock); every duration shown was measured by one process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

STATIONS = ("route", "queue", "prefill", "transfer", "decode")


@dataclass(frozen=True)
class Span:
    """Holds one span; times are in seconds since the epoch."""

    trace: str
    name: str
    service: str
    start: float
    end: float
    attributes: dict[str, str]


class Receiver(otlp_grpc.TraceServiceServicer):
    """Collects what the cluster exports."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        """Stores one batch of spans."""
        with self._lock:
            for resource in request.resource_spans:
                service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(s, service) for s in scope.spans]
        return otlp.ExportTraceServiceResponse()


def _span(s: Any, service: str) -> Span:
    attributes = {a.key: str(getattr(a.value, a.value.WhichOneof("value") or "string_value")) for a in s.attributes}
    return Span(
        s.trace_id.hex(), s.name, service, s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9, attributes
    )


def receive() -> tuple[Receiver, int, grpc.Server]:
    """An OTLP server on a free port."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return receiver, port, server


def serve(otlp_port: int, port: int, args: list[str]) -> subprocess.Popen[bytes]:
    """A cluster on ``port`` that exports to ``otlp_port``, up and ready."""
    env = os.environ | {"BATON_TELEMETRY__OTLP_ENDPOINT": f"127.0.0.1:{otlp_port}"}
    command = [
        str(Path(sys.executable).parent / "baton"),
        "serve",
        "--port",
        str(port),
        "--grpc-port",
        str(port + 1),
    ]
    cluster = subprocess.Popen([*command, *args], env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and cluster.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1).read()
            return cluster
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the cluster did not come up")


def complete(port: int, prompt: list[int], tokens: int) -> float:
    """One greedy completion of ``prompt``, streamed; its TTFT in seconds, as a client sees it."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as response:
        response.readline()
        first = time.monotonic() - began
        response.read()
    return first


def parts_of_ttft(spans: list[Span], ttft: float) -> str:
    """The client's TTFT, split: what the spans don't cover is named for where it lies."""
    named = {s.name: s for s in spans}
    queue, prefill = named["queue"], named["prefill"]
    parts = {
        "arrive": queue.start - named["route"].start,
        "queue": queue.end - queue.start,
        "admit": prefill.start - queue.end,
        "prefill": prefill.end - prefill.start,
    }
    parts["HTTP, tokens back"] = ttft - sum(parts.values())
    return f"TTFT {ttft * 1e3:.1f} ms = " + " + ".join(f"{name} {part * 1e3:.1f}" for name, part in parts.items())


def pick(spans: list[Span]) -> list[Span]:
    """The spans of the newest trace that has all five stations, in order of their start."""
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace, []).append(span)
    whole = [t for t in traces.values() if {s.name for s in t} >= set(STATIONS)]
    if not whole:
        raise SystemExit(
            f"no trace has all of {STATIONS}: {[sorted({s.name for s in t}) for t in traces.values()]}"
        )
    newest = max(whole, key=lambda t: min(s.start for s in t))
    return sorted((s for s in newest if s.name in STATIONS), key=lambda s: STATIONS.index(s.name))


def draw(spans: list[Span], title: str, out: Path) -> None:
    """A bar per span, one row each."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    zero = min(s.start for s in spans)
    colours = dict(zip(STATIONS, ("#4c566a", "#b48ead", "#5e81ac", "#d08770", "#a3be8c"), strict=True))
    figure, axes = plt.subplots(figsize=(9, 2.6))
    for row, span in enumerate(spans):
        left, width = (span.start - zero) * 1e3, (span.end - span.start) * 1e3
        axes.barh(row, max(width, 0.15), left=left, color=colours[span.name])
        axes.text(left + width + 2, row, f"{width:.1f} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(spans)), [f"{s.name}  ({s.service})" for s in spans], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("ms since the router took the request")
    axes.set_title(title, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Runs a cluster, traces a request and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--port", type=int, default=8710)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/trace.svg"))
    args, rest = parser.parse_known_args()
    receiver, otlp_port, server = receive()
    cluster = serve(otlp_port, args.port, rest)
    try:
        for seed in range(4):  # the last one is drawn: warm, and with a prompt nobody has seen
            ttft = complete(
                args.port, [(seed * 7919 + 13 * i) % 1500 + 300 for i in range(args.prompt_tokens)], args.tokens
            )
        time.sleep(2.0)  # exporters flush twice a second
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(30)
        server.stop(0)
    spans = pick(receiver.spans)
    for span in spans:
        print(f"{span.name:10} {(span.end - span.start) * 1e3:9.2f} ms  {span.service}  {span.attributes}")
    split = parts_of_ttft(spans, ttft)
    print(split)
    title = f"One request, 1P1D: {args.prompt_tokens} prompt tokens, {args.tokens} answered\n{split}"
    draw(spans, title, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
