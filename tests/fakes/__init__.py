# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver without a GPU, and NCCL without one too, for the tests.

`fake_cuda.c` and its neighbours are built into a shared library, which the real loader opens
through its environment variable. Device memory is POSIX shared memory, so handles work between
real processes; the kernels' own source runs on the CPU; work on a stream may lag behind.

A process chooses its pretended host by environment before the driver is first used:

FAKE_CUDA_DEVICES          "2", or kinds: "GPU,MIG,GPU"; CUDA_VISIBLE_DEVICES works as usual
FAKE_CUDA_LAG_US           how long each piece of stream work takes to begin
FAKE_CUDA_FAIL             "cuMemAlloc_v2:2,any:17:2": the n-th call fails (with this code)
FAKE_CUDA_NO_PTX/_IPC/_PEER  kernels do not load; no handle can be made; no peer access
FAKE_CUDA_MEMORY           bytes per device
FAKE_CUDA_DRIVER_VERSION   as cuDriverGetVersion gives it
FAKE_CUDA_SESSION          shared by the processes of one scenario; names their shared memory
FAKE_NCCL_VERSION          as ncclGetVersion gives it
FAKE_NCCL_IN_PROGRESS      1: operations are launched in the background, as the real one does
FAKE_NCCL_REPORT_DEATH     1: a dead rank is a remote error; otherwise it is waited for, for ever

`environment()` makes such an environment for a child process, `driver()` controls the fake in
this one. Misuse (a double close, memory freed while another process has it mapped, a copy from
freed memory) is recorded for the whole session: `misuse()`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHM = Path("/dev/shm")

LIBRARIES = {
    "libfake_cuda.so": ("fake_cuda.c", "fake_memory.c", "fake_stream.c", "fake_kernels.c"),
    "libfake_nccl.so": ("fake_nccl.c",),
}
INPUTS = ("csrc/transport/*.h", "csrc/transport/kernels/*", "csrc/core/arl_status.h")
FLAGS = [
    *("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes"),
    *("-Wformat=2", "-Werror"),
]
if "libasan" in os.environ.get("LD_PRELOAD", ""):  # a sanitizer run: these libraries too
    FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

LIVE = ("allocations", "mappings", "pinned", "streams", "events", "modules", "graphs", "contexts")


# ---- building -----------------------------------------------------------------------------------


def _fingerprint() -> str:
    files = sorted([*HERE.glob("*.[ch]"), *itertools.chain(*(ROOT.glob(p) for p in INPUTS))])
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def build() -> Path:
    """Build the libraries, unless these very sources were built before; return their folder."""
    target = HERE / "build" / _fingerprint()
    if target.is_dir():
        return target
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiler = os.environ.get("CC", "cc").split()
        for library, sources in LIBRARIES.items():
            command = [*compiler, *FLAGS, f"-I{ROOT / 'csrc'}", "-o", f"{folder}/{library}"]
            command += [str(HERE / source) for source in sources]
            if library != "libfake_cuda.so":
                command += [f"-L{folder}", "-Wl,-rpath,$ORIGIN", "-lfake_cuda"]
            command += ["-lrt", "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode != 0:
                raise RuntimeError(f"cannot build {library}:\n{done.stderr[:4000]}")
        try:
            Path(folder).rename(target)
            Path(folder).mkdir()  # for the context manager to remove
        except OSError:  # another process was first
            if not target.is_dir():
                raise
    target.chmod(0o755)
    return target


# ---- sessions -----------------------------------------------------------------------------------

_numbers = itertools.count(1)


def new_session() -> str:
    """Return a name that no other scenario uses."""
    return f"fk{os.getpid():x}-{next(_numbers):x}"


def environment(session: str, **settings: Any) -> dict[str, str]:
    """Return the variables that make a process use the fakes: FAKE_CUDA_<SETTING>=value."""
    folder = build()
    values = {
        "ARCTIC_RL_C_CUDA_DRIVER": str(folder / "libfake_cuda.so"),
        "ARCTIC_RL_C_NCCL": str(folder / "libfake_nccl.so"),
        "FAKE_CUDA_SESSION": session,
    }
    for name, value in settings.items():
        values[f"FAKE_CUDA_{name.upper()}"] = str(value)
    return values


class _Control(ctypes.Structure):
    _fields_ = (
        ("misuse_count", ctypes.c_int),
        ("first_misuse", ctypes.c_char * 240),
        ("serial", ctypes.c_longlong),
    )


def misuse(session: str) -> str | None:
    """Return the first misuse that any process of the session committed."""
    try:
        control = _Control.from_buffer_copy((SHM / f"{session}-control").read_bytes())
    except FileNotFoundError:
        return None
    return control.first_misuse.decode() if control.misuse_count else None


def leftovers(session: str) -> list[str]:
    """Return the names of device memory that nobody freed (killed processes leave theirs)."""
    names = (path.name for path in SHM.glob(f"{session}-*"))
    return sorted(name for name in names if "-control" not in name and "-nccl-" not in name)


def clean(session: str) -> None:
    """Remove what a session left in /dev/shm."""
    for path in SHM.glob(f"{session}-*"):
        path.unlink(missing_ok=True)


@contextmanager
def session(**settings: Any) -> Iterator[dict[str, str]]:
    """An environment for the processes of one scenario; checks for misuse and cleans up."""
    name = new_session()
    try:
        yield environment(name, **settings)
        found = misuse(name)
        assert found is None, f"misuse of the driver: {found}"
    finally:
        clean(name)


# ---- the driver of this process -----------------------------------------------------------------


class Driver:
    """The fake driver in this process: allocations, failures, lag, counters."""

    def __init__(self, name: str) -> None:
        self.session = name
        self.library = library = ctypes.CDLL(str(build() / "libfake_cuda.so"))
        library.fake_cuda_alloc.argtypes = (
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_size_t),
        )
        library.fake_cuda_fail.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int)
        library.fake_cuda_live.restype = ctypes.c_long
        library.fake_cuda_calls.restype = ctypes.c_long
        library.fake_cuda_pending.restype = ctypes.c_long
        library.fake_cuda_lag.argtypes = (ctypes.c_long,)
        library.cuMemFree_v2.argtypes = (ctypes.c_size_t,)
        if library.cuInit(0) != 0:
            raise RuntimeError("the fake driver does not start: is CUDA_VISIBLE_DEVICES set?")

    def allocate(self, nbytes: int, device: int = 0, vmm: bool = False) -> int:
        """Return the address of new device memory; `vmm` memory has no legacy handle."""
        pointer = ctypes.c_size_t()
        code = self.library.fake_cuda_alloc(device, nbytes, vmm, ctypes.byref(pointer))
        if code != 0:
            raise MemoryError(f"fake device {device}: error {code} for {nbytes} bytes")
        return pointer.value

    def free(self, pointer: int) -> None:
        code = self.library.cuMemFree_v2(pointer)
        assert code == 0, f"cuMemFree: {code}"

    def fail(self, name: str, nth: int, code: int = 0) -> None:
        """Let the n-th call of `name` (or of "any" function) from now on fail."""
        self.library.fake_cuda_fail(name.encode(), nth, code)

    def reset(self) -> None:
        """No failures, no lag, nothing held."""
        self.library.fake_cuda_fail_clear()
        self.library.fake_cuda_lag(0)
        self.library.fake_cuda_hold(0)

    def lag(self, microseconds: int) -> None:
        self.library.fake_cuda_lag(microseconds)

    def hold(self, on: bool) -> None:
        """While on, no stream work runs at all: a GPU that hangs."""
        self.library.fake_cuda_hold(on)

    def calls(self) -> int:
        return int(self.library.fake_cuda_calls())

    def pending(self) -> int:
        """Pieces of stream work that have not run."""
        return int(self.library.fake_cuda_pending())

    def live(self) -> dict[str, int]:
        """What is alive in this process, by kind."""
        return {kind: int(self.library.fake_cuda_live(i)) for i, kind in enumerate(LIVE)}

    @functools.cached_property
    def nccl(self) -> ctypes.CDLL:
        """The fake NCCL of this process."""
        library = ctypes.CDLL(str(build() / "libfake_nccl.so"))
        library.fake_nccl_live.restype = ctypes.c_long
        library.fake_nccl_sent.restype = ctypes.c_long
        return library

    def communicators(self) -> int:
        """Communicators that are neither destroyed nor aborted."""
        return int(self.nccl.fake_nccl_live())

    def sent(self) -> int:
        """Bytes that this process has sent over NCCL, as the root of a broadcast too."""
        return int(self.nccl.fake_nccl_sent())

    def inject(self, error: int) -> None:
        """Let the next question for an asynchronous NCCL error be answered with this one."""
        self.nccl.fake_nccl_inject(error)

    def depth(self) -> int:
        """Contexts on this thread's stack."""
        return int(self.library.fake_cuda_depth())


@functools.cache
def driver() -> Driver:
    """Return the fake of this process, starting it. Sets this process's environment."""
    if "FAKE_CUDA_SESSION" not in os.environ:
        os.environ.update(environment(new_session()))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return Driver(os.environ["FAKE_CUDA_SESSION"])


# ---- arrays in device memory --------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _Memory:
    """One allocation, freed when no array uses it any more."""

    def __init__(self, nbytes: int, device: int, vmm: bool) -> None:
        self.pointer = driver().allocate(nbytes, device, vmm)
        self.nbytes, self.device, self.pid = nbytes, device, os.getpid()

    def window(self) -> Any:
        """The bytes as a buffer that keeps this alive."""
        window = (ctypes.c_char * self.nbytes).from_address(self.pointer)
        window.memory = self
        return window

    def __del__(self) -> None:
        if getattr(self, "pointer", 0) and self.pid == os.getpid():
            driver().free(self.pointer)


class DeviceArray:
    """An array in fake device memory. `array` is the same memory as NumPy sees it.

    `kind` overrides the DLPack type code, for the types that NumPy lacks: a bfloat16 array is
    uint16 here with kind 4.
    """

    def __init__(self, memory: _Memory, array: np.ndarray, kind: int | None = None) -> None:
        self.memory, self.array, self.kind = memory, array, kind

    def view(self, index: Any) -> DeviceArray:
        """The same memory, indexed as NumPy does (slices, None, Ellipsis)."""
        return DeviceArray(self.memory, self.array[index], self.kind)

    def transposed(self, *axes: int) -> DeviceArray:
        return DeviceArray(self.memory, self.array.transpose(*axes), self.kind)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.memory.device

    def __dlpack__(self, **_unused: Any) -> Any:
        """NumPy's own capsule, moved to the device: its deleter keeps the array alive."""
        capsule = self.array.__dlpack__()
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        tensor.device_type, tensor.device_id = 2, self.memory.device
        if self.kind is not None:
            tensor.code = self.kind
        return capsule


def address_of(tensor: Any) -> int:
    """Where the bytes of anything with __dlpack__ begin."""
    capsule = tensor.__dlpack__()
    found = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    return int(found.data + found.byte_offset)


def read(address: int, nbytes: int) -> bytes:
    """Bytes of fake device memory, of this process or mapped from another."""
    return ctypes.string_at(address, nbytes)


def device_array(
    values: np.ndarray, device: int = 0, vmm: bool = False, kind: int | None = None, offset: int = 0
) -> DeviceArray:
    """Copy `values` into new device memory, `offset` bytes after its beginning."""
    values = np.ascontiguousarray(values)
    memory = _Memory(max(values.nbytes + offset, 1), device, vmm)
    array = np.frombuffer(memory.window(), values.dtype, values.size, offset).reshape(values.shape)
    array[...] = values
    return DeviceArray(memory, array, kind)
