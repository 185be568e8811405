"""The process that has a worker's ranks on another host: it ends with its lead, and obeys its own build alone."""

import os
import socket
from pathlib import Path

import pytest

from baton.engine.backends.ranks.hosts.control import Control, dial
from baton.engine.backends.ranks.hosts.messages import HostStart
from baton.engine.backends.ranks.hosts.session import HostSession
from baton.engine.config import EngineConfig
from baton.kernels.abi.build import sources_key
from baton.protos.errors import StartupError
from tests.e2e.fleet import wait_for
from tests.e2e.test_ranks import gone
from tests.engine.backends.ranks.other_host import children, other_host

FAR = ("elsewhere:1",)


def test_a_lead_that_goes_while_ranks_load_takes_them_along(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # whoever reads it waits for good
    with other_host() as (address, agent):
        lead = dial(address, b"", "worker.rank_hosts")
        lead.send(HostStart(EngineConfig(str(tmp_path), threads=1, pp=2, rank_hosts=FAR), 1, 1, 2, sources_key()))
        (rank,) = wait_for(lambda: [rank for session in children(agent) for rank in children(session)])
        lead.close()
        wait_for(lambda: not children(agent), what="the session's end")
        wait_for(lambda: gone(rank), what="the rank's end")


def test_a_lead_of_another_build_is_refused_in_words(tmp_path: Path) -> None:
    listener, config = socket.create_server(("127.0.0.1", 0)), EngineConfig(str(tmp_path), pp=2, rank_hosts=FAR)
    with listener, socket.create_connection(listener.getsockname(), 30) as lead:
        with pytest.raises(StartupError, match="another version of Baton than their lead"):
            HostSession(HostStart(config, 1, 1, 2, "others"), Control(lead))
