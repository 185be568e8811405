"""Stands in for ``nixl._api`` where NIXL isn't installed: agents of one process that really copy bytes.

A read is under way for a few looks, and its bytes come with the last: whoever takes them earlier finds others.
Memory that nobody registered, and agents that nobody knows, are refused as NIXL refuses them.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from typing import Any

LOOKS = 3  # that a read takes
AGENTS: dict[str, nixl_agent] = {}


class nixl_agent_config:
    def __init__(self, enable_prog_thread: bool, backends: list[str]) -> None:
        assert enable_prog_thread
        assert backends == ["UCX"]


class nixl_agent:
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self.name, self.memory = name, list[tuple[int, int]]()
        self._known: set[str] = set()
        self._reads: dict[int, list[Any]] = {}
        self._serial = itertools.count()
        AGENTS[name] = self

    def register_memory(self, pieces: list[tuple[int, int, int, str]], mem_type: str) -> list[tuple[int, int]]:
        found = [(at, size) for at, size, _, _ in pieces]
        self.memory += found
        return found

    def deregister_memory(self, pieces: list[tuple[int, int]]) -> None:
        for piece in pieces:
            self.memory.remove(piece)

    def get_agent_metadata(self) -> bytes:
        return json.dumps({"name": self.name}).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = json.loads(metadata)["name"]
        self._known.add(name)
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        self._known.remove(name)

    def get_xfer_descs(self, pieces: list[tuple[int, int, int]], mem_type: str) -> list[tuple[int, int]]:
        return [(at, size) for at, size, _ in pieces]

    def initialize_xfer(
        self, way: str, ours: list[tuple[int, int]], theirs: list[tuple[int, int]], name: str
    ) -> int:
        assert way == "READ"
        assert [size for _, size in ours] == [size for _, size in theirs]
        for agent, pieces in ((self, ours), (AGENTS[name], theirs)):
            for at, size in pieces:
                if not any(begin <= at and at + size <= begin + most for begin, most in agent.memory):
                    raise RuntimeError("NIXL_ERR_NOT_FOUND")
        handle = next(self._serial)
        self._reads[handle] = [LOOKS, ours, theirs, name]
        return handle

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        read = self._reads[handle]
        read[0] -= 1
        if read[0] > 0:
            return "PROC"
        for (to, size), (source, _) in zip(*read[1:3], strict=True):
            if not AGENTS[read[3]].memory:  # it has gone meanwhile
                return "ERR"
            ctypes.memmove(to, source, size)
        return "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        del self._reads[handle]
