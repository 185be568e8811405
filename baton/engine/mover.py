"""Runs torch.distributed for the nccl transport, in a process of its own: joins groups and moves bytes of staging
memory.

Knows nothing of frames or leases, and never sees a page. A *channel* is a torch.distributed group of two processes,
made without a global world because workers come and go; rank 0 receives and rank 1 sends. Each channel has a thread
and handles its messages in order. With CUDA the group is NCCL's and bytes pass through device memory: the I/O
process's staging on its GPU, or else a buffer of this process. Without CUDA, the same calls use gloo.

    python -m baton.engine.mover FD      FD: a SOCK_SEQPACKET socket to the I/O process; ends with it
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import socket
import sys
import threading
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from baton.kernels.cuda.library import on_shim
from baton.kv.memory.cuda_driver import Driver, driver
from baton.kv.wire.moving import (
    ChannelBroken,
    ChannelJoined,
    ChannelLeft,
    JoinChannel,
    LeaveChannel,
    MoveBytes,
    MoveDone,
    ServeRendezvous,
    ToMover,
)
from baton.protos.errors import ConfigError
from baton.protos.measurements import SharedPages

TIMEOUT_S = 60.0  # seconds to join, because the other mover may be loading torch, and for one message
MAX_MESSAGE = 64 << 10  # bytes of one message between the I/O process and its mover
CUDA = torch.cuda.is_available() and dist.is_nccl_available()


class MoverChannel:
    """Owns a torch.distributed group of two and the thread that sends or receives on it."""

    def __init__(self, join: JoinChannel, staging: mmap.mmap, mover: Mover) -> None:
        self._join, self._mover, self._staging = join, mover, staging
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._on_card = join.device is not None and CUDA
        self._todo: queue.SimpleQueue[MoveBytes | None] = queue.SimpleQueue()
        self._group: Any = None  # torch's stubs lack send and recv
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, move: MoveBytes | None) -> None:
        """Queues ``move`` after the earlier ones; None closes the channel once they are done."""
        self._todo.put(move)

    def _run(self) -> None:
        name, move = self._join.channel, MoveBytes("", 0, 0, 0)
        opened = 0
        try:
            if self._join.device is None:
                self._bytes = torch.frombuffer(self._staging, dtype=torch.uint8)
            else:
                opened = card(self._join.device).open(self._join.device.handle)
                self._bytes = bytes_at(opened, self._join.device.size)
            self._group = make_group(self._join, self._mover.store_of(self._join))
            self._mover.say(ChannelJoined(name))
            while (next_move := self._todo.get()) is not None:
                move = next_move
                self._do(move)
                self._mover.say(MoveDone(name, move.number))
        except (RuntimeError, ConfigError) as error:  # torch.distributed's: the peer is gone, or does not come
            self._mover.say(ChannelBroken(name, str(error).splitlines()[0][:300]))
        finally:
            self._group = None  # closes its connections: the peer notices
            if opened:
                driver().close(opened)
            self._mover.gone(name)
            self._mover.say(ChannelLeft(name))

    def _do(self, move: MoveBytes) -> None:
        part = self._bytes[move.offset : move.offset + move.size]
        sends = self._join.rank == 1
        if not CUDA or self._on_card:
            held = part
        else:
            held = part.cuda() if sends else torch.empty_like(part, device="cuda")
        work = self._group.send([held], 0, 0) if sends else self._group.recv([held], 1, 0)
        work.wait()
        if CUDA:
            torch.cuda.current_stream().synchronize()
            if not sends and held is not part:
                part.copy_(held)


class Mover:
    """Runs all channels of one worker, as the I/O process at the other end of ``sock`` asks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._channels: dict[str, MoverChannel] = {}
        self._stores: dict[int, dist.TCPStore] = {}  # ours, by port
        self._lock = threading.Lock()

    def run(self) -> None:
        """Handles messages of the I/O process until it closes the socket or dies."""
        decode = msgspec.msgpack.Decoder(ToMover).decode
        while True:
            try:
                data, fds, *_ = socket.recv_fds(self._sock, MAX_MESSAGE, 1)
            except ConnectionResetError:  # it was killed with words of ours unread
                return
            if not data:
                return
            self._take(decode(data), fds)

    def _take(self, message: ServeRendezvous | JoinChannel | MoveBytes | LeaveChannel, fds: list[int]) -> None:
        if isinstance(message, ServeRendezvous):
            self._stores[message.port] = dist.TCPStore(
                message.host, message.port, None, True, timedelta(seconds=TIMEOUT_S),
                wait_for_workers=False, master_listen_fd=fds[0],
            )  # fmt: skip
        elif isinstance(message, JoinChannel):
            staging = mmap.mmap(fds[0], message.staging_bytes, mmap.MAP_SHARED)
            os.close(fds[0])
            with self._lock:
                self._channels[message.channel] = MoverChannel(message, staging, self)
        else:
            with self._lock:
                channel = self._channels.get(message.channel)
            if channel is not None:
                channel.put(None if isinstance(message, LeaveChannel) else message)

    def store_of(self, join: JoinChannel) -> dist.TCPStore:
        """Returns the TCP store at which the two ends of a channel meet: this process's own for a receiver, a
        connection to the receiver's for a sender.
        """
        if join.rank == 0:
            return self._stores[join.port]
        limit = timedelta(seconds=TIMEOUT_S)
        return dist.TCPStore(join.host, join.port, None, False, limit, wait_for_workers=False)

    def gone(self, channel: str) -> None:
        """Removes a channel whose thread ends from the table."""
        with self._lock:
            self._channels.pop(channel, None)

    def say(self, message: msgspec.Struct) -> None:
        """Sends a message to the I/O process, from any thread (one message is one packet); exits the process if the
        I/O process is gone.
        """
        try:
            self._sock.send(msgspec.msgpack.encode(message))
        except OSError:
            os._exit(0)  # it is gone


class _Bytes:
    """Presents memory of a GPU to torch by ``__cuda_array_interface__``."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def card(shared: SharedPages) -> Driver:
    """Returns the CUDA driver of the GPU that ``shared`` is memory of, made current for this thread. Raises
    ConfigError if that is another GPU than this process's, or torch lacks CUDA or NCCL.
    """
    if not CUDA and not on_shim():
        why = "CUDA" if not torch.cuda.is_available() else "NCCL"
        raise ConfigError(f"blocks on a card go by NCCL, and this torch has no {why}", "worker.kv_transport")
    found = driver()
    if found.card != shared.card:
        raise ConfigError(f"staging is on card {shared.card}, this process sees {found.card}", "worker.device")
    found.enter()  # a channel's thread
    return found


def bytes_at(address: int, size: int) -> torch.Tensor:
    """Returns a uint8 tensor (size,) over the GPU memory at ``address``, or over host memory if a shim stands in
    for the GPU.
    """
    if CUDA:
        return torch.as_tensor(_Bytes(address, size), device="cuda")
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def make_group(join: JoinChannel, store: dist.Store) -> Any:
    """Returns the torch.distributed process group (NCCL, or gloo without CUDA) of a channel's two ranks. Raises
    RuntimeError if the other end doesn't join within TIMEOUT_S.
    """
    named = dist.PrefixStore(join.group, store)
    if CUDA:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        return dist.ProcessGroupNCCL(named, join.rank, 2, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=join.own_host)]
    gloo._timeout, gloo._threads = timedelta(seconds=TIMEOUT_S), 1
    return dist.ProcessGroupGloo(named, join.rank, 2, gloo)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Mover(socket.socket(fileno=int(sys.argv[1]))).run()
