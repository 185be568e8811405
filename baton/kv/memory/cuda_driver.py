"""Calls the CUDA driver, as far as sharing GPU memory between processes needs it. Torch-free.

Knows nothing of KV or of sockets. The library comes with every NVIDIA driver and is called by ctypes. The context
is the GPU's primary one, which the kernels' runtime uses as well, so that kernels can be launched on streams made
here. One thread uses it; others may wait for an event after ``enter``. Every failed call raises ConfigError with
the driver's message, except that a failure to release something is only logged.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

from baton.kv.memory import copying
from baton.protos.errors import ConfigError

log = logging.getLogger("baton.kv")

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: beside the default stream, and beside others' work on the card
SLEEPING, WITHOUT_TIME = 1, 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
PORTABLE, SEEN_BY_KERNELS = 1, 2  # CU_MEMHOSTALLOC_PORTABLE (and …REGISTER_…), …_DEVICEMAP


class _Handle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class Driver:
    """Calls the CUDA driver ``library`` for the first device that this process sees.

    ``card`` is the GPU's UUID in hex, which names it to other processes. Every method may raise ConfigError.
    """

    def __init__(self, library: str) -> None:
        try:
            self._calls = ctypes.CDLL(library)
        except OSError as error:
            raise ConfigError(
                f"worker.kv_transport cuda_ipc needs an NVIDIA driver on this host, and {library} can't be loaded "
                f"({error}); set it to auto",
                "worker.kv_transport",
            ) from None
        device, self._context, uuid = ctypes.c_int(), ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDeviceGetUuid_v2", uuid, device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()
        self.card = bytes(uuid).hex()

    def enter(self) -> None:
        """Makes the GPU's context current for the calling thread, which may then use this object."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, size: int) -> int:
        """Allocates ``size`` bytes of GPU memory and returns their address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """Frees GPU memory that ``allocate`` returned."""
        self._give_back("cuMemFree_v2", ctypes.c_uint64(address))

    def share(self, address: int) -> bytes:
        """Returns a handle by which another process of this user can ``open`` the allocated memory ``address``."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Maps another process's GPU memory by its ``handle`` and returns its address in this process."""
        address = ctypes.c_uint64()
        shared = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), shared, ctypes.c_uint(LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        """Unmaps memory that ``open`` returned."""
        self._give_back("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def upload(self, address: int, view: memoryview) -> None:
        """Copies ``view`` from the host to GPU memory at ``address``; complete once ``wait`` has returned."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), _at(view), ctypes.c_size_t(len(view)))

    def download(self, view: memoryview, address: int) -> None:
        """Copies GPU memory at ``address`` to ``view`` on the host; complete on return."""
        self._call("cuMemcpyDtoH_v2", _at(view), ctypes.c_uint64(address), ctypes.c_size_t(len(view)))

    def wait(self) -> None:
        """Waits until uploads are complete: one from pageable memory may return earlier."""
        self._call("cuCtxSynchronize")

    def pinned(self, size: int) -> int:
        """Allocates ``size`` bytes of pinned host memory, which kernels can access at the same address, and returns
        that address.
        """
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), PORTABLE | SEEN_BY_KERNELS)
        return address.value or 0

    def unpinned(self, address: int) -> None:
        """Frees host memory that ``pinned`` returned."""
        self._give_back("cuMemFreeHost", ctypes.c_void_p(address))

    def pin(self, view: memoryview) -> None:
        """Pins existing host memory, so that copies run at full speed and asynchronously."""
        self._call("cuMemHostRegister_v2", _at(view), ctypes.c_size_t(len(view)), PORTABLE)

    def stream(self) -> int:
        """Returns the handle of a new CUDA stream, which runs concurrently with all other work."""
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(made), NON_BLOCKING)
        return made.value or 0

    def event(self) -> int:
        """Returns the handle of a new CUDA event; threads that wait for it sleep."""
        made = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(made), SLEEPING | WITHOUT_TIME)
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """Records ``event`` after all work that was queued on ``stream`` so far."""
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait_for(self, event: int) -> None:
        """Waits until the work before ``event`` is complete. Any thread that has called ``enter`` may call it."""
        self._call("cuEventSynchronize", ctypes.c_void_p(event))

    def settle(self, stream: int) -> None:
        """Waits until all work queued on ``stream`` is complete, or has failed."""
        self._give_back("cuStreamSynchronize", ctypes.c_void_p(stream))

    def bring(self, to: int, address: int, size: int, stream: int) -> None:
        """Queues a copy of ``size`` bytes from GPU memory ``address`` to host memory ``to`` on ``stream``."""
        sizes = ctypes.c_size_t(size), ctypes.c_void_p(stream)
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(to), ctypes.c_uint64(address), *sizes)

    def _give_back(self, name: str, *arguments: object) -> None:
        try:
            self._call(name, *arguments)
        except ConfigError as error:
            log.warning("%s", error.message)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._calls, name)(*arguments)
        if status:
            said = ctypes.c_char_p()
            self._calls.cuGetErrorString(status, ctypes.byref(said))
            text = (said.value or b"unknown").decode(errors="replace")
            raise ConfigError(f"worker.kv_transport cuda_ipc: {name}: {text} ({status})", "worker.kv_transport")


def driver() -> Driver:
    """Returns this process's ``Driver``, loaded once. Raises ConfigError if there is no GPU."""
    return _loaded(LIBRARY)


_loaded = cache(Driver)


def _at(view: memoryview) -> ctypes.c_void_p:
    return ctypes.c_void_p(copying.address(view))
