"""What the engine process and its own children do first: read their arguments, and end with who started them.

Knows nothing of what they compute.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


class ChildArguments(argparse.Namespace):
    """Holds a child's command line: what it is to do, its end of a socket pair, and the pid of who started it."""

    spec: str
    fd: int
    parent: int


def child_arguments(module: str, spec: str) -> ChildArguments:
    """Returns the command line of ``python -m module``; ``spec`` names the struct that ``--spec`` is JSON of.

    From here on the kernel ends this process with its parent, signals such as Ctrl-C are that one's alone, and
    no child of this process inherits ``fd``: a compiler that outlives it must not keep the socket open.
    """
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--spec", required=True, help=f"{spec} as JSON")
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of the socket pair")
    parser.add_argument("--parent", type=int, required=True, help="pid of the process that started this one")
    arguments = parser.parse_args(namespace=ChildArguments())
    die_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(arguments.fd, False)
    return arguments


def die_with(parent: int) -> None:
    """Has the kernel end this process with process ``parent``, which started it; exits where that is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone already")
