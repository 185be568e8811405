"""The engine process as its I/O process sees it: started, talked to, ended.

Knows nothing of what the messages mean beyond the first two.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from functools import partial

import msgspec

from baton.kv.memory.device_pages import opened_or_none
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import FROM_CARD
from baton.process.effort import Efforts, efforts_of
from baton.process.endings import OomKills, ending_of
from baton.process.processes import die_with_parent
from baton.protos.channel import EngineFailed, EngineReady, Shutdown
from baton.protos.errors import ConfigError, StartupError, from_info
from baton.worker.channel import IoChannel
from baton.worker.spec import MemberSpec, WorkerSpec, dump_spec

log = logging.getLogger("baton.worker")


class EngineProcess:
    """A running engine process, with its channel, its shared KV pages (``memory``) and its EngineReady.

    Start it from the main thread, because it is killed when the thread that started it ends.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: IoChannel, wants_card: bool = True):
        self.process = process
        self.channel = channel
        self._wants_card = wants_card
        self._memory = OomKills()
        self.memory: PageMemory
        self.ready: EngineReady

    @staticmethod
    def command(spec: WorkerSpec, fd: int) -> list[str]:
        """Returns the child's command line, in which the spec has no Redis URL, because command lines are public.

        ``fd`` is the child's end of the socket pair.
        """
        told = msgspec.structs.replace(spec, member=MemberSpec())
        command = [sys.executable, "-m", "baton.worker.engine_main", "--spec", dump_spec(told), "--fd", str(fd)]
        return [*command, "--parent", str(os.getpid())]

    @classmethod
    def spawn(cls, spec: WorkerSpec, fd: int) -> subprocess.Popen[bytes]:
        """Starts the child process with its end ``fd`` of the socket pair."""
        # A session of its own: autogroup scheduling then shares the cores between engine and I/O. The kernel learns
        # whom it dies with before anything is imported: an orphan would compete with its starting successor.
        return subprocess.Popen(
            cls.command(spec, fd), pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )  # fmt: skip

    @classmethod
    async def start(cls, spec: WorkerSpec) -> EngineProcess:
        """Starts an engine and waits until its model is loaded. Raises the engine's own StartupError."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = cls.spawn(spec, theirs.fileno())
        engine = cls(process, await IoChannel.open(ours), spec.server.kv_transport in FROM_CARD)
        try:
            await engine._await_ready()
        except BaseException:
            engine.kill()
            raise
        return engine

    async def _await_ready(self) -> None:
        try:
            fd = await self.channel.receive_fd()
            message = await self.channel.receive()
        except EOFError:
            raise StartupError(f"the engine process died at start ({self.obituary()}); see its log") from None
        if isinstance(message, EngineFailed):
            raise from_info(message.error)
        assert fd is not None, "an engine sends its pages before anything else"
        assert isinstance(message, EngineReady), "an engine's first message is EngineReady or EngineFailed"
        self.ready = message
        self.memory = PageMemory.attach(fd, message.pages, message.layout.page_bytes)
        if message.device_pages is not None and self._wants_card:
            self.memory.device = opened_or_none(message.device_pages, self.memory.view())

    def efforts(self) -> Efforts:
        """Returns the seconds that each thread of the engine, and of its ranks, computed or waited for a core."""
        return efforts_of(self.process.pid)

    def obituary(self) -> str:
        """Returns how the engine process ended, in words, waiting up to a second for its exit status."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its channel closed"
        return ending_of(code, self._memory).detail

    def leave(self, patience_s: float = 1.0) -> None:
        """Closes the engine's memory on its GPU, asks the engine to end, and kills it after ``patience_s``
        seconds.
        """
        self._close_card()
        self.channel.send(Shutdown())
        self.channel.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def _close_card(self) -> None:
        """Closes the memory before the engine frees it, which is undefined while another process has it open."""
        device, self.memory.device = self.memory.device, None
        if device is None:
            return
        try:
            device.close()
        except ConfigError as error:
            log.warning("the engine's pages on its card could not be closed: %s", error.message)

    def kill(self) -> None:
        """Kills the engine process and waits for its end."""
        self.channel.close()
        self.process.kill()
        self.process.wait()
