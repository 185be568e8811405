"""Checks of the kernel and its devices: clock, memory, limits, network interfaces, GPUs, compilers.

Knows nothing of Redis, Ray or transports. Everything is read from /proc, /sys and system calls; nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from baton.cluster.config import BatonConfig
from baton.console.setup.doctor.card import earlier_trial, told_choices, told_products
from baton.console.setup.findings import Finding
from baton.engine.backends.cuda.gpu import Gpu, Probe, probe, require, without_kernels
from baton.kernels.abi import build, native
from baton.kv.transport import FROM_CARD
from baton.launch.plans import workers_on_card, workers_on_gpu
from baton.launch.single import usable_cores
from baton.process.memory import available_bytes
from baton.protos.errors import ConfigError
from baton.worker.kv_memory import ON_A_CPU, kv_room
from baton.worker.spec import CacheSpec

TIME_ERROR, STA_UNSYNC = 5, 0x0040  # adjtimex(2)'s state and status bit for a clock that nothing synchronizes
MIB, GIB = 1 << 20, 1 << 30  # bytes
WANTED_FILES = 65_536  # descriptors, because each stream of an answer is a connection
WANTED_MTU = 1500  # bytes, Ethernet's; less means a tunnel
SYS = Path("/sys")


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), as far as it is read; the rest is room."""

    _fields_ = [
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("room", ctypes.c_byte * 256),
    ]  # fmt: skip


def clock() -> Finding:
    """Checks that this machine's clock is synchronized, which certificates and traces depend on."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return Finding("clock", "skip", f"adjtimex: {os.strerror(ctypes.get_errno())}")
    if state == TIME_ERROR or timex.status & STA_UNSYNC:
        return Finding("clock", "warn", "nobody says that it is synchronized", "run chrony or systemd-timesyncd")
    return Finding("clock", "ok", f"synchronized, at most {timex.maxerror / 1e3:.0f} ms off")


def cores(config: BatonConfig) -> Finding:
    """Checks that there are enough CPU cores for the workers that the configuration starts on one machine."""
    have, workers = usable_cores(), config.cluster.decode + config.cluster.prefill_workers
    said = f"{have} usable of {os.cpu_count()}, {_isa()}"
    if config.worker.device == "cpu" and have < workers:
        remedy = "fewer workers (--prefill, --decode, --colocated), or more cores"
        return Finding("cpu", "warn", f"{said}, for {workers} workers on this machine", remedy)
    return Finding("cpu", "ok", said)


def _isa() -> str:
    """The ISA of native kernels, and the wider one that the kernel keeps from them."""
    refused = "amx" in native.able() and native.isa() != "amx" and not os.environ.get(native.ISA_ENV)
    return f"ISA {native.isa()}" + (" (the kernel refuses AMX tiles)" if refused else "")


def memory(config: BatonConfig) -> Finding:
    """Checks that there is memory for the KV pages and host tiers of every worker on one machine."""
    available = available_bytes()
    workers = config.cluster.decode + config.cluster.prefill_workers
    wanted = workers * ((config.worker.kv_memory_bytes or ON_A_CPU) + config.worker.host_tier_bytes)
    said = f"{available / GIB:.1f} GiB available, KV of {workers} workers takes {wanted / GIB:.1f}"
    if config.worker.device != "cuda" and wanted > 0.8 * available:
        return Finding("memory", "fail", said, "lower worker.kv_memory_bytes or worker.host_tier_bytes")
    return Finding("memory", "ok", said)


def huge_pages() -> Finding:
    """Checks that transparent huge pages are enabled for memfds, in which KV pages lie."""
    folder = SYS / "kernel/mm/transparent_hugepage"
    chosen = {name: _chosen(folder / name) for name in ("enabled", "shmem_enabled")}
    if not any(chosen.values()):
        return Finding("huge pages", "skip", "this kernel has no transparent huge pages")
    said = ", ".join(f"{name} {value}" for name, value in chosen.items())
    if chosen["enabled"] == "never" or chosen["shmem_enabled"] in ("never", "deny"):
        remedy = f"echo advise > {folder}/shmem_enabled (as root): attention over long contexts misses the TLB less"
        return Finding("huge pages", "warn", said, remedy)
    return Finding("huge pages", "ok", said)


def limits(config: BatonConfig) -> list[Finding]:
    """Checks the limits of open files and of locked memory."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{_limit(files[0])} open files (may be raised to {_limit(files[1])})"
    found = [Finding("nofile", "ok", said)]
    if files[1] != resource.RLIM_INFINITY and files[1] < WANTED_FILES:
        remedy = f"ulimit -n {WANTED_FILES}, LimitNOFILE= of the unit; each stream of an answer is a connection"
        found = [Finding("nofile", "warn", said, remedy)]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = f"{_limit(locked, mib=True)} may be locked"
    if (
        config.worker.device == "cuda"
        and locked != resource.RLIM_INFINITY
        and locked < (config.worker.kv_memory_bytes or GIB)
    ):
        remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity: pages that a GPU copies from are pinned"
        return [*found, Finding("memlock", "warn", said, remedy)]
    return [*found, Finding("memlock", "ok", said)]


def mtu() -> Finding:
    """Checks the MTU of every network interface that is up."""
    up = {}
    for folder in sorted(SYS.glob("class/net/*")):
        if folder.name != "lo" and _text(folder / "operstate") in ("up", "unknown"):
            up[folder.name] = int(_text(folder / "mtu") or 0)
    if not up:
        return Finding("mtu", "skip", "no interface but loopback is up")
    said = ", ".join(f"{name} {size}" for name, size in up.items())
    if min(up.values()) < WANTED_MTU:
        remedy = "raise it (an overlay network takes 50 bytes): KV goes in small packets otherwise"
        return Finding("mtu", "warn", said, remedy)
    return Finding("mtu", "ok", said + ("" if max(up.values()) > WANTED_MTU else "; 9000 is better between hosts"))


def compiler() -> Finding:
    """Checks that native CPU kernels are built, or that there is a compiler to build them."""
    try:
        path = native.newest(native.isa()) if native.isa() != native.REFERENCE else None
    except build.BuildError as error:
        remedy = (
            f"install g++, or set {build.PREBUILT_ENV} to libraries built elsewhere; without, a CPU worker is slow"
        )
        return Finding("kernels", "warn", str(error).splitlines()[0], remedy)
    return Finding("kernels", "ok", str(path) if path else "the references, as BATON_ISA asks")


def gpu(config: BatonConfig, ask: Probe = probe) -> Finding:
    """Checks the GPU of this machine by the same questions as a worker at its start, and how KV will leave it."""
    device = config.worker.device
    try:
        found = require(ask=ask)
    except ConfigError as error:
        what, _, remedy = error.message.removeprefix("device cuda: ").rpartition("; ")
        if device == "cuda":
            return Finding("gpu", "fail", what, remedy)
        return Finding("gpu", "skip", f"{what}; {'the CPU serves' if device == 'auto' else 'none is asked for'}")
    release = ".".join(map(str, found.driver))
    said = f"{found.name}, {found.memory_bytes / GIB:.0f} GiB, a driver for CUDA {release}"
    if why := without_kernels(found):
        said += f"; torch's ops serve there, not our own kernels: {why}"
        said += f" ({figures})" if (figures := told_choices(found)) else ""
    else:
        said += f"; {figures} (baton doctor --gpu)" if (figures := earlier_trial(found)) else ""
        said += f"; {figures}" if (figures := told_products(found)) else ""
        said += f"; where torch's ops serve: {figures}" if (figures := told_choices(found)) else ""
    if device not in ("cuda", "auto"):
        return Finding("gpu", "ok", f"{said}; none is asked for")
    said += f"; before weights, {_kv_room(config, found)}"
    way = config.worker.kv_transport
    if way not in FROM_CARD:
        return Finding("gpu", "ok", f"{said}; KV leaves by the host's pages (worker.kv_transport is {way})")
    if found.exclusive:
        what = f"{said}, and one process at a time may use it: no handoff goes from card to card"
        return Finding("gpu", "warn", what, "nvidia-smi -c DEFAULT, or kv_transport = shm")
    return Finding("gpu", "ok", f"{said}; KV goes from card to card: cuda_ipc on one, nccl between two")


def _kv_room(config: BatonConfig, gpu: Gpu) -> str:
    """Returns what each of this machine's workers may take for KV, weights not counted, in words."""
    worker = config.worker
    if worker.kv_memory_bytes or worker.pages:
        return "KV takes what worker.kv_memory_bytes or worker.pages says"
    if worker.device == "auto":  # a start resolves it likewise
        config = config.model_copy(update={"worker": worker.model_copy(update={"device": "cuda"})})
    cache = CacheSpec(
        kv_memory_share=worker.kv_memory_share,
        kv_host_share=worker.kv_host_share,
        kv_mirror=worker.kv_mirror,
        kv_sharers=workers_on_gpu(config),
        card_sharers=workers_on_card(config, config.worker),
    )
    return kv_room(cache, gpu, 0, available_bytes(), whole=bool(without_kernels(gpu))).told


def _chosen(path: Path) -> str:
    """Returns the word in brackets, which is the choice that is in force."""
    return _text(path).partition("[")[2].partition("]")[0]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _limit(value: int, mib: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{value / MIB:g} MiB" if mib else str(value)
