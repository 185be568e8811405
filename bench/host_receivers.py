"""Counts how much of a prompt's KV goes through the lead's host of a decode worker whose ranks are on two hosts.

    python -m bench.host_receivers [--prompts N] [--tokens N]

Two "hosts" are process groups of this machine, joined by TCP over loopback. A prefill worker hands off to a decode
worker; each has two stages, one on each host. Told are the KV bytes that the prefill worker sent and that each host
of the decode worker received (their metrics). So is what the decode worker's engine sent on to the other host over
the connections between ranks, as the kernel counts it (``ss``).
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from baton.cluster.served_model import DEMO
from baton.launch.fleet import Fleet

MODEL = str(DEMO.parent / "demo-draft")
ANSWER = 4  # tokens, so that steps add little
BODY = {"temperature": 0, "ignore_eos": True, "max_tokens": ANSWER}


@contextmanager
def other_host() -> Iterator[str]:
    """Runs ``baton ranks``; yields its address."""
    command = [sys.executable, "-m", "baton", "ranks", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait(30)


def sent_on(pid: int) -> int:
    """Returns the bytes that a process has sent over all of its TCP connections."""
    found, own = 0, False
    for line in subprocess.run(["ss", "-tinpOH"], capture_output=True, text=True, check=True).stdout.splitlines():
        own = f"pid={pid}," in line
        if own and (said := re.search(r"\bbytes_sent:(\d+)", line)):
            found += int(said[1])
    return found


def told(fleet: Fleet, slot: str, name: str) -> dict[str, float]:
    """Returns the values of a worker's metric ``name`` by the label host."""
    found = dict[str, float]()
    for line in httpx.get(f"http://{fleet.record(slot).metrics_address}/metrics", timeout=60).text.splitlines():
        if line.startswith(name + "{"):
            host = re.search(r'[{,]host="([^"]*)"', line)
            found["" if host is None else host[1]] = float(line.rpartition(" ")[2])
    return found


def prompt(seed: int, length: int) -> list[int]:
    """Returns the ids of a prompt that no other seed begins with."""
    return [(seed * 977 + 7 * at + at * at) % 4000 + 3 for at in range(length)]


def ask(fleet: Fleet, tokens: list[int]) -> float:
    """Returns the seconds until an answer of ANSWER tokens is complete."""
    began = time.perf_counter()
    reply = httpx.post(f"{fleet.url}/v1/completions", json={"prompt": tokens, **BODY}, timeout=120)
    reply.raise_for_status()
    return time.perf_counter() - began


def main() -> int:
    """Prints the bytes per prompt token."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1800)
    own = parser.parse_args()
    with other_host() as address:
        worker = {"model": MODEL, "kv_transport": "tcp", "pp": 2, "rank_hosts": [address]}
        router = {"local_prefill_max_tokens": 0, "policy": "round_robin"}
        with Fleet(cluster={"prefill": 1, "decode": 1}, worker=worker, router=router) as fleet:
            times = [ask(fleet, prompt(seed, own.tokens)) for seed in range(own.prompts)]
            time.sleep(1.0)  # metrics are reported ten times a second
            sent = sum(told(fleet, "prefill-0", "baton_kv_transfer_bytes_total").values())
            came = told(fleet, "decode-0", "baton_kv_received_bytes_total")
            on = sent_on(fleet.record("decode-0").engine_pid)
    tokens = own.prompts * own.tokens
    print(f"{own.prompts} prompts of {own.tokens} tokens, answers of {ANSWER}, in {MODEL.rpartition('/')[2]}")
    print(f"KV bytes per prompt token: {sent / tokens:,.0f} sent")
    for host, size in came.items():
        print(f"  {size / tokens:,.0f} received by {host}")
    print(f"  {on / tokens:,.0f} sent on from the lead's engine to the other host, with what steps exchange")
    print(f"an answer took {statistics.median(times) * 1e3:,.0f} ms (median)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
