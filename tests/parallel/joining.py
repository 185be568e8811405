"""Is what pytest-xdist starts as a process of tests: has ``collected`` fork one in its place, and ends with it.

Imports little, because each run waits for it. Knows nothing of pytest.
"""

import os
import signal
import socket
import sys

STANDARD = (0, 1, 2)


def main() -> None:
    """Hands this process's input and outputs to a fork, and ends as that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork is interrupted itself, and has to clean up
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(bytes.fromhex(sys.argv[1]))
    socket.send_fds(connection, [b"join"], STANDARD)
    connection.recv(64)  # its pid
    for fd in STANDARD[:2]:  # the fork alone ends the conversation
        os.close(fd)
    status = connection.recv(64)
    os._exit(0 if status == b"0" else 1)


if __name__ == "__main__":
    main()
