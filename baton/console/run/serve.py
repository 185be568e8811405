"""``baton serve``: brings a cluster up, shows each step, waits for Ctrl-C, takes it down.

Knows nothing of the parts; ``launch.local`` does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from baton.cluster.config import BatonConfig, load_config
from baton.console.setup.certs import ensure
from baton.console.setup.check import names_of, profile_of
from baton.console.setup.findings import require_none_failed
from baton.console.setup.places import keys_of, places_of
from baton.engine.backends.cuda.gpu import Probe, probe, require, resolved_device
from baton.launch.local import LocalCluster
from baton.router.text.encoder_style import EncoderStyle, encoder_style

INTERRUPTED = 130  # exit status of a shell command that SIGINT ended: 128 + 2


class Progress:
    """Prints a line per step, with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()

    def __call__(self, part: str, what: str) -> None:
        seconds = time.monotonic() - self._start
        self._console.print(f"[dim]{seconds:6.1f} s[/]  [bold]{part:<10}[/] {escape(what)}", soft_wrap=True)


def run(config_path: str | None, flags: Mapping[str, Mapping[str, object]]) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code. Raises StartupError and its subclasses."""
    config = one_worker_for_an_encoder(on_this_machine(load_config(config_path, flags)))
    require_known(config)
    return asyncio.run(_serve(config, Console(highlight=False)))


def on_this_machine(config: BatonConfig, ask: Probe = probe) -> BatonConfig:
    """Returns ``config`` with device "auto" resolved by this machine's GPU, if workers are started here.

    Raises ConfigError if "cuda" is asked for and can't be used.
    """
    if config.ray.address:
        return config  # each worker's own machine says
    device = resolved_device(config.worker.device, ask)
    if config.worker.device == "cuda":
        require(ask=ask)
    return config.model_copy(update={"worker": config.worker.model_copy(update={"device": device})})


def require_known(config: BatonConfig) -> None:
    """Raises ConfigError for a name that stands for nothing (a policy, a parser, a transport, a speculator, a paced
    profile), for a file of keys that can't be read, and for what workers here would not find (an adapter, a model
    that drafts), before anything is started.
    """
    places = [] if config.ray.address else places_of(config)  # workers' machines are others then
    require_none_failed((*names_of(config), *profile_of(config), *keys_of(config), *places))


def one_worker_for_an_encoder(config: BatonConfig) -> BatonConfig:
    """Returns ``config`` without its prefill worker where the model's directory holds an encoder, which has no KV
    to hand over; several workers stay as they are. Raises CheckpointError for a config.json that can't be read.
    """
    if config.cluster.prefill_workers > 1 or encoder_of(config) is None:
        return config
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"colocated": True})})


def encoder_of(config: BatonConfig) -> EncoderStyle | None:
    """Returns what the encoder in the model's directory makes; None for another model, or one not here yet."""
    return encoder_style(Path(config.worker.model).expanduser()) if config.worker.model else None


async def _serve(config: BatonConfig, console: Console) -> int:
    progress = Progress(console)
    ensure(config, progress)
    cluster = LocalCluster(config, progress)
    progress("logs", str(cluster.files.logs))
    work = asyncio.create_task(_stay_up(cluster, console))
    _on_signals(work, cluster, console)
    try:
        await work
    except asyncio.CancelledError:
        progress("stopped", "no process is left")
    return 0


async def _stay_up(cluster: LocalCluster, console: Console) -> None:
    async with cluster:
        console.print(f"\n{welcome(cluster)}\n", markup=False, soft_wrap=True)
        await asyncio.Event().wait()  # until a signal cancels us


def welcome(cluster: LocalCluster) -> str:
    """Returns the text shown once the cluster is up: its URL, a curl command to try, and the
    dashboard's URL.
    """
    router, trust = cluster.config.router, _certificates(cluster.config)
    path, asked = first_question(cluster.config)
    body = json.dumps({"model": cluster.name, **asked})
    key = "-H 'Authorization: Bearer YOUR_KEY' " if cluster.config.router.keys_file else ""
    return (
        f"Serving {cluster.name} at {cluster.url} (REST) and {router.host}:{router.grpc_port} (gRPC). Try:\n\n"
        f"  curl {trust}{cluster.url}{path} {key}-H 'Content-Type: application/json' -d '{body}'\n\n"
        f"Dashboard: {cluster.url}/dashboard/ (in a terminal: baton top)\n\nCtrl-C stops it."
    )


def first_question(config: BatonConfig) -> tuple[str, dict[str, object]]:
    """Returns a path and a body, without the model's name, that the model can answer."""
    encoder = encoder_of(config)
    if encoder is None:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    if encoder.scores:
        return "/v1/rerank", {"query": "a greeting", "documents": ["Hello!", "A river."]}
    return "/v1/embeddings", {"input": "Hello!"}


def _certificates(config: BatonConfig) -> str:
    """Options with which curl trusts the router, and shows a certificate where one is asked for."""
    if not config.tls.dir:
        return ""
    own = f" --cert {config.tls.dir}/client.crt --key {config.tls.dir}/client.key" if config.tls.client_ca else ""
    return f"--cacert {config.tls.dir}/ca.crt{own} "


def _on_signals(work: asyncio.Task[None], cluster: LocalCluster, console: Console) -> None:
    """The first signal takes the cluster down in order, the second one at once."""
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            cluster.kill()
            os._exit(INTERRUPTED)
        asked = True
        console.print("stopping …")
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
