"""Checks whether this machine's GPU can run the engine, by querying the driver before anything is loaded.
Torch-free.

Knows nothing of models except how many bytes they need. The driver is called by ctypes, without a context on the
GPU; a ConfigError says what is missing and what to do.

    device   cuda   a GPU, or an error
             auto   a GPU if there is a suitable one, else the CPU, with the reason in the log
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton.protos.errors import ConfigError

log = logging.getLogger("baton.engine")

LIBRARY = "libcuda.so.1"
SETTING = "worker.device"
CAPABILITY = (9, 0)  # that the engine's kernels need: sm_90a runs on this one alone (H100, H200, GH200)
OLDEST, NEWEST = (8, 0), (12, 9)  # on which torch's ops are used; older GPUs lack bfloat16, newer are unknown
RELEASE = 13  # CUDA release that kernels and torch are built with; a driver runs its own and older ones
DRIVER = "580"  # the first driver of that release
ROOM_BYTES = 1 << 30  # bytes needed beyond the weights, for contexts, graphs and workspaces
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
_MODE, _EXCLUSIVE = 20, 3  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_EXCLUSIVE_PROCESS
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
CPU_REMEDY = "or use --device cpu"


@dataclass(frozen=True)
class Gpu:
    """The first GPU that this process sees."""

    name: str
    capability: tuple[int, int]  # compute capability, e.g. (9, 0)
    driver: tuple[int, int]  # the newest CUDA release that it runs
    memory_bytes: int
    exclusive: bool = False  # nvidia-smi -c EXCLUSIVE_PROCESS: one process at a time


Probe = Callable[[], Gpu]


def probe(library: str = LIBRARY) -> Gpu:
    """Returns a description of the first GPU that the driver ``library`` sees. Raises ConfigError if there is no
    driver or no GPU.
    """
    driver, _ = _opened(library)
    number, device = ctypes.c_int(), ctypes.c_int()
    _checked(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), 0))
    _checked(driver, "cuDriverGetVersion", driver.cuDriverGetVersion(ctypes.byref(number)))
    return Gpu(
        _name(driver, device),
        (_attribute(driver, device, _MAJOR), _attribute(driver, device, _MINOR)),
        (number.value // 1000, number.value % 1000 // 10),
        _memory(driver, device),
        _attribute(driver, device, _MODE) == _EXCLUSIVE,
    )


def identities(library: str = LIBRARY) -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs that this process sees, in hexadecimal digits and in its order; they are the
    same in every process. Raises ConfigError if there is no driver or no GPU.
    """
    driver, count = _opened(library)
    found, device, uuid = [], ctypes.c_int(), (ctypes.c_ubyte * 16)()
    for ordinal in range(count):
        _checked(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
        _checked(driver, "cuDeviceGetUuid", driver.cuDeviceGetUuid_v2(uuid, device))
        found.append(bytes(uuid).hex())
    return tuple(found)


def require(needed_bytes: int = 0, ask: Probe = probe) -> Gpu:
    """Returns the GPU if it can run the engine with ``needed_bytes`` bytes of weights. Raises ConfigError with the
    reason if it can't.
    """
    gpu = ask()
    if gpu.driver[0] < RELEASE:
        raise _wrong(
            f"the driver of {gpu.name} runs CUDA {gpu.driver[0]}.{gpu.driver[1]}, and the kernels are built with "
            f"CUDA {RELEASE}; update it to {DRIVER} or newer, {CPU_REMEDY}"
        )
    if not OLDEST <= gpu.capability <= NEWEST:
        have, first, last = ("{}.{}".format(*pair) for pair in (gpu.capability, OLDEST, NEWEST))
        raise _wrong(
            f"{gpu.name} has compute capability {have}, and {first} to {last} are served; "
            f"take another GPU, {CPU_REMEDY}"
        )
    if needed_bytes and gpu.memory_bytes < needed_bytes + ROOM_BYTES:
        raise _wrong(
            f"{gpu.name} has {_gib(gpu.memory_bytes)}, and the model's weights and what runs them need "
            f"{_gib(needed_bytes + ROOM_BYTES)}; take a smaller model or a larger GPU, {CPU_REMEDY}"
        )
    return gpu


def without_kernels(gpu: Gpu) -> str:
    """Returns the reason why the engine's own kernels can't run on ``gpu``, so that torch's ops are used; empty if
    they can.
    """
    if gpu.capability == CAPABILITY:
        return ""
    have, want = ("{}.{}".format(*pair) for pair in (gpu.capability, CAPABILITY))
    return f"they are built for compute capability {want} (H100, H200), and {gpu.name} has {have}"


def resolved_device(device: str, ask: Probe = probe) -> str:
    """Returns ``device``, with "auto" replaced by "cuda" or "cpu"; the log says why it is the CPU."""
    if device != "auto":
        return device
    try:
        gpu = require(ask=ask)
    except ConfigError as error:
        log.warning("device auto: running on the CPU, as %s", error.message.removeprefix("device cuda: "))
        return "cpu"
    log.info("device auto: running on %s", gpu.name)
    return "cuda"


def _opened(library: str) -> tuple[ctypes.CDLL, int]:
    """Returns the driver, initialized, and the number of GPUs that it sees, one at least. Raises
    ConfigError.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise _wrong(
            f"no NVIDIA driver is here ({error}); install it (in a container: the NVIDIA runtime), {CPU_REMEDY}"
        ) from None
    status = driver.cuInit(0)
    count = ctypes.c_int()
    if status != _NO_DEVICE:
        _checked(driver, "cuInit", status)
        _checked(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    if not count.value:
        raise _wrong(f"the driver sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES, {CPU_REMEDY}")
    return driver, count.value


def _name(driver: ctypes.CDLL, device: ctypes.c_int) -> str:
    text = ctypes.create_string_buffer(256)
    _checked(driver, "cuDeviceGetName", driver.cuDeviceGetName(text, len(text), device))
    return text.value.decode(errors="replace")


def _memory(driver: ctypes.CDLL, device: ctypes.c_int) -> int:
    size = ctypes.c_size_t()
    _checked(driver, "cuDeviceTotalMem", driver.cuDeviceTotalMem_v2(ctypes.byref(size), device))
    return size.value


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    _checked(driver, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(ctypes.byref(value), which, device))
    return value.value


def _checked(driver: ctypes.CDLL, name: str, status: int) -> None:
    if status:
        said = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(said))
        text = (said.value or b"unknown").decode(errors="replace")
        raise _wrong(f"the NVIDIA driver says: {text} ({name}, {status}); nvidia-smi must work here, {CPU_REMEDY}")


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"device cuda: {text}", SETTING)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
