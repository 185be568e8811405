"""Tests the user-space link: what goes through it, when, and how much is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.namespaces import ADDRESS, FAR, NEAR, Impossible, two_hosts
from bench.rough_link import QUEUED_PACKETS, OneWay, Roughness


def test_packets_arrive_in_order_when_the_delay_is_over() -> None:
    way = OneWay(Roughness(delay_s=0.5), seed=1)
    for number in range(3):
        way.enter(b"%d" % number, now=float(number))
    assert way.next_at() == 0.5
    assert way.leave(0.4) == []
    assert way.leave(1.6) == [b"0", b"1"]
    assert (way.leave(9.0), way.next_at(), way.carried) == ([b"2"], None, 3)


def test_as_many_are_lost_as_was_asked_for_and_the_same_ones_each_time() -> None:
    ways = [OneWay(Roughness(loss=0.02), seed=5) for _ in range(2)]
    for way in ways:
        for number in range(10_000):
            way.enter(number.to_bytes(4, "little"), now=0.0)
    assert ways[0].leave(0.0) == ways[1].leave(0.0)
    assert 150 < ways[0].dropped < 250


def test_a_full_queue_drops_what_comes() -> None:
    way = OneWay(Roughness(delay_s=1.0), seed=1)
    for _ in range(QUEUED_PACKETS + 7):
        way.enter(b"", now=0.0)
    assert way.dropped == 7


@pytest.mark.soak  # needs root and the names of bench.two_hosts
def test_two_hosts_are_as_far_apart_as_was_said() -> None:
    try:
        with two_hosts(Roughness(delay_s=0.02)):
            code = f"""
import socket, time
begun = time.monotonic()
for _ in range(5):
    assert socket.socket().connect_ex(({ADDRESS[FAR]!r}, 9)) == 111  # refused, a round trip away
print((time.monotonic() - begun) / 5)
"""
            command = ["ip", "netns", "exec", NEAR, sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    except Impossible as why:
        pytest.skip(str(why))
    assert done.returncode == 0, done.stderr
    assert 0.04 <= float(done.stdout) < 0.08
