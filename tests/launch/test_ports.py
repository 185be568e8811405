"""Ports for clusters whose ports nobody chose: free now, and not among those that the kernel gives away."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.launch import ports
from baton.launch.ports import free_ports


def test_they_differ_are_free_and_are_below_the_kernels_own():
    found = free_ports(20)
    assert len(set(found)) == 20
    assert max(found) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_no_other_process_finds_them_before_their_servers_have_bound_them():
    found = free_ports(5)
    code = """
import sys
from baton.launch import ports
for port in map(int, sys.argv[1:]):
    ports.FIRST = ports.LAST = port
    try:
        print(ports.free_ports(1))
    except OSError:
        pass
"""
    other = subprocess.run(
        [sys.executable, "-c", code, *map(str, found)], capture_output=True, text=True, check=True
    )
    assert other.stdout == ""
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_in_use_is_passed_over_and_none_is_an_error(monkeypatch):
    [taken] = free_ports(1)
    monkeypatch.setattr(ports, "FIRST", taken)
    monkeypatch.setattr(ports, "LAST", taken)
    with socket.create_server(("127.0.0.1", taken)), pytest.raises(OSError, match="no 1 free ports"):
        free_ports(1)
