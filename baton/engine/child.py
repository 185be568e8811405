"""Prepares the engine process and its own children: reads their command lines, and ties each one's life to its
parent's.

Knows nothing of what they compute.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl's number for "a signal when my parent ends" (linux/prctl.h)


class ChildArguments(argparse.Namespace):
    """Holds the command line of a child process."""

    spec: str  # JSON that says what to do
    fd: int  # the inherited end of a socket pair
    parent: int  # pid of the process that started this one


def child_arguments(module: str, spec: str) -> ChildArguments:
    """Returns the command line of ``python -m module`` and prepares the process; ``spec`` names the struct in
    ``--spec``, for the help text.

    From then on the kernel kills this process when its parent dies, SIGINT and SIGTERM are ignored (the parent
    handles them), and the process's own children don't inherit ``fd``, which they could keep open after it has
    ended.
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
    """Has the kernel kill this process when process ``parent``, which started it, dies; exits at once if that has
    happened already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone already")
