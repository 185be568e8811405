"""Ranks of several hosts refuse by name the shares that need one host's memory."""

import pytest

from baton.engine.backends.ranks.hosts.layout import require_layout
from baton.engine.config import EngineConfig
from baton.protos.errors import ConfigError
from tests.engine.test_models import program


def test_recurrent_states_stay_on_one_host() -> None:
    here = EngineConfig("model", pp=2)
    require_layout(here, program("qwen3_next"))
    with pytest.raises(ConfigError, match="recurrent state runs on ranks of one host"):
        require_layout(EngineConfig("model", pp=2, rank_hosts=("elsewhere:1",)), program("qwen3_next"))
