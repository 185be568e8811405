"""The process that forks grammar processes, after loading the tokenizer once.

Knows nothing of grammars. It has one thread and no torch, so a fork takes milliseconds and is safe. It ends when
its parent closes the control socket; its children end when their own peers close theirs.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from baton.grammars.child import serve
from baton.grammars.limits import ProcessBounds
from baton.grammars.messages import PACKET_BYTES, Fork, ProcessEnded, TokenizerFailed, TokenizerSpec, ToServer
from baton.protos.errors import InvalidRequest
from baton.protos.grammar import byte_tokenizer, compiled
from baton.protos.json import Json
from baton.protos.nouns import Grammar

# Signals by which a process is killed from outside, the first of them where memory is short.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    """Serves until the parent closes the control socket; returns the exit status.

    Arguments: the control socket's descriptor, and a TokenizerSpec as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is our parent's to act on
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    try:
        spec = msgspec.json.decode(sys.argv[2], type=TokenizerSpec)
        tokenizer = load(spec)
    except InvalidRequest as error:
        control.send(msgspec.msgpack.encode(TokenizerFailed(error.message)))
        return 1
    compiled(Grammar("json_schema", "{}"), tokenizer)  # what is loaded at first use is loaded before the forks
    gc.freeze()
    ProcessServer(control, tokenizer, spec.bounds).run()
    return 0


def load(spec: TokenizerSpec) -> LLTokenizer:
    """Returns the tokenizer that ``spec`` names. Raises InvalidRequest if it can't follow a grammar."""
    if not spec.path:
        return byte_tokenizer(spec.vocab_size)
    if spec.ends:
        with suppress(Exception):  # one of them may be beyond the file's ids
            return LLTokenizer(spec.path, n_vocab=spec.vocab_size, eos_token=list(spec.ends))
    ends = list(spec.ends) or [spec.vocab_size]  # without an end of its own a model gets one that it can't choose
    try:
        text = with_ids_to(max(ends), Path(spec.path).read_bytes())
        return LLTokenizer(text, n_vocab=max(spec.vocab_size, max(ends) + 1), eos_token=ends)
    except Exception as error:  # the library raises what its readers do
        raise InvalidRequest(f"this model's tokenizer can't follow a grammar: {error}", "grammar") from None


def with_ids_to(last: int, tokenizer: bytes) -> str:
    """Returns a tokenizer.json with special tokens added until id ``last`` is one, because llguidance takes an end
    only from the tokenizer's own ids.
    """
    fields = msgspec.json.decode(tokenizer, type=Json)
    added, vocab = fields.get("added_tokens") or [], fields["model"]["vocab"]
    pieces = set(vocab.values()) if isinstance(vocab, dict) else range(len(vocab))  # Unigram's is a list
    known = {*pieces, *(token["id"] for token in added)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    missing = (number for number in range(max(known) + 1, last + 1))
    fields["added_tokens"] = [*added, *({"id": n, "content": f"<|baton-{n}|>", **plain} for n in missing)]
    return msgspec.json.encode(fields).decode()


class ProcessServer:
    """Forks, kills and reaps grammar processes as the messages on ``control`` ask."""

    def __init__(self, control: socket.socket, tokenizer: LLTokenizer, bounds: ProcessBounds) -> None:
        self._control, self._tokenizer, self._bounds = control, tokenizer, bounds
        self._decoder = msgspec.msgpack.Decoder(ToServer)
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._pids: dict[int, int] = {}  # by number
        self._numbers: dict[int, int] = {}  # by pidfd
        self._sockets: dict[int, socket.socket] = {}  # by number: open until its user was told how it ended

    def run(self) -> None:
        """Serves messages until the parent closes the control socket."""
        while True:
            for ready, _ in self._poller.poll():
                if ready in self._numbers:
                    self._reap(ready)
                elif not self._told():
                    return

    def _told(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        if not packet:
            return False
        message = self._decoder.decode(packet)
        if isinstance(message, Fork):
            self._fork(message.number, socket.socket(fileno=fds[0]))
        elif message.number in self._pids:
            os.kill(self._pids[message.number], signal.SIGKILL)  # not reaped yet, so the pid is still its own
        return True

    def _fork(self, number: int, sock: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            self._be_child(sock)
        self._pids[number], self._sockets[number] = pid, sock
        watched = os.pidfd_open(pid)
        self._numbers[watched] = number
        self._poller.register(watched, select.POLLIN)

    def _be_child(self, sock: socket.socket) -> None:
        status = 1
        try:
            self._control.close()
            for other in self._numbers:
                os.close(other)
            for peer in self._sockets.values():
                peer.close()
            with suppress(OSError):  # the peer left while it was answered
                serve(sock, self._tokenizer, self._bounds)
            status = 0
        finally:
            os._exit(status)

    def _reap(self, watched: int) -> None:
        self._poller.unregister(watched)
        os.close(watched)
        number = self._numbers.pop(watched)
        _, status = os.waitpid(self._pids.pop(number), 0)
        code = os.waitstatus_to_exitcode(status)
        ended = ProcessEnded(code != 0 and -code not in _FROM_OUTSIDE)
        with self._sockets.pop(number) as sock, suppress(OSError):  # its user has left, or reads nothing
            sock.send(msgspec.msgpack.encode(ended), socket.MSG_DONTWAIT)


if __name__ == "__main__":
    sys.exit(main())
