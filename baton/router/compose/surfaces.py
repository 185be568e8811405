"""Builds from the config the parts that API surfaces share.

Knows nothing of sockets, or of how dispatch works.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from baton.cluster.config import RouterConfig
from baton.cluster.metering.telemetry import RouterMetrics
from baton.router.answer.grammar_check import GrammarCheck
from baton.router.answer.metering import Metering, NoMetering, TallyMetering
from baton.router.answer.quotas import Quotas
from baton.router.answer.service import GenerationService, ParserNames
from baton.router.answer.validate import Limits
from baton.router.observe.live import LiveStats
from baton.router.observe.recorder import TraceRecorder
from baton.router.observe.tallies import Tallies
from baton.router.request.context_class import ContextClasses
from baton.router.request.environment import Environment
from baton.router.request.request import ServingBackend
from baton.router.text import reasoning_parsers, tool_parsers
from baton.router.text.catalog import ModelCatalog


def make_generation(
    config: RouterConfig,
    serving: ServingBackend,
    catalog: ModelCatalog,
    quotas: Quotas,
    metering: Metering,
    environment: Environment,
) -> GenerationService:
    """Returns the service shared by the generating surfaces, with the config's limits.

    Raises ConfigError for an unknown parser.
    """
    tool_parsers.load(config.tool_parser)
    reasoning_parsers.load(config.reasoning_parser)
    limits = Limits(
        max_body_bytes=config.max_body_bytes,
        max_stored_bytes=config.max_stored_bytes,
        max_n=config.max_n,
        max_stop=config.max_stop,
        max_prompts=config.max_prompts,
        max_inflight_bytes=config.max_inflight_bytes,
        request_timeout_s=config.request_timeout_s,
    )
    parsers = ParserNames(config.tool_parser, config.reasoning_parser)
    return GenerationService(serving, catalog, limits, environment, GrammarCheck(), quotas, metering, parsers)


def make_metering(
    config: RouterConfig, metrics: RouterMetrics, live: LiveStats | None, environment: Environment
) -> Metering:
    """Returns the meters of answers; NoMetering if neither telemetry nor a trace file is configured."""
    recorder = _recorder(config, environment.wall_clock, environment.entropy)
    if not metrics.enabled and recorder is None:
        return NoMetering()
    tallies = Tallies(metrics, live, environment.clock, environment.wall_clock, recorder)
    return TallyMetering(tallies, ContextClasses(config.context_classes))


def _recorder(
    config: RouterConfig, wall_clock: Callable[[], float], entropy: Callable[[int], bytes]
) -> TraceRecorder | None:
    """Returns the recorder of this router process, which writes a file of its own."""
    if not config.trace_file:
        return None
    path = Path(config.trace_file).expanduser()
    if config.processes > 1:
        path = path.with_name(f"{path.stem}.pid{os.getpid()}{path.suffix}")
    return TraceRecorder(str(path), config.trace_file_bytes, wall_clock, entropy)
