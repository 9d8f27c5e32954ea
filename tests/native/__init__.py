# SPDX-License-Identifier: Apache-2.0
"""The plain C layers (csrc/core, csrc/transport) through ctypes, below the Python binding.

For what has no public name of its own: the loader, the device copy engine. The library is built
from the sources beside it, so it needs a C compiler; it is also how benchmarks/gpu_copy_probe.py
reaches the engine on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DIMS = 8
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-shared", "-pthread"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
if "libasan" in os.environ.get("LD_PRELOAD", ""):  # a sanitizer run: these libraries too
    FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class NativeError(Exception):
    """A status other than ARL_OK, with the text of its arl_error_t."""

    def __init__(self, code: str, operation: str, text: str) -> None:
        super().__init__(f"{code} in {operation}: {text}")
        self.code, self.operation, self.text = code, operation, text


class Copy(ctypes.Structure):
    """arl_copy_t"""

    _fields_ = (
        ("alloc", ctypes.c_uint32),
        ("tensor", ctypes.c_uint32),
        ("binding", ctypes.c_uint32),
        ("src_offset", ctypes.c_int64),
        ("dst", ctypes.c_void_p),
        ("run_bytes", ctypes.c_int64),
        ("ndim", ctypes.c_int),
        ("count", ctypes.c_int64 * DIMS),
        ("src_stride", ctypes.c_int64 * DIMS),
        ("dst_stride", ctypes.c_int64 * DIMS),
    )


class View(ctypes.Structure):
    """arl_view_t"""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("itemsize", ctypes.c_size_t),
        ("ndim", ctypes.c_int),
        ("shape", ctypes.c_int64 * DIMS),
        ("strides", ctypes.c_int64 * DIMS),
        ("device_type", ctypes.c_int),
        ("device_index", ctypes.c_int),
        ("readonly", ctypes.c_bool),
    )


class Pointer(ctypes.Structure):
    """arl_cuda_pointer_t"""

    _fields_ = (
        ("ordinal", ctypes.c_int),
        ("base", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("buffer_id", ctypes.c_uint64),
        ("legacy_ipc", ctypes.c_bool),
        ("managed", ctypes.c_bool),
    )


def _sources() -> list[Path]:
    core = [p for p in sorted((ROOT / "csrc/core").glob("*.c")) if "<yaml.h>" not in p.read_text()]
    return [*core, *sorted((ROOT / "csrc/transport").glob("*.c")), HERE / "shim.c"]


@functools.cache
def build() -> Path:
    """Compile the library, unless these very sources were compiled before; return its path."""
    inputs = [
        *_sources(),
        *(ROOT / "csrc/core").glob("*.h"),
        *(ROOT / "csrc/transport").glob("*.h"),
    ]
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for file in sorted(inputs):
        digest.update(file.name.encode() + file.read_bytes())
    folder = HERE / "build"
    folder.mkdir(exist_ok=True)
    target = folder / f"libarl-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as made:
        command = [
            *os.environ.get("CC", "cc").split(),
            *FLAGS,
            f"-I{ROOT / 'csrc'}",
            "-o",
            made.name,
        ]
        command += [*map(str, _sources()), "-ldl", "-lrt", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        Path(made.name).unlink()
        raise RuntimeError(f"cannot build the C layers:\n{done.stderr[:4000]}")
    Path(made.name).rename(target)
    return target


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, with the signatures that ctypes does not guess."""
    lib = ctypes.CDLL(str(build()))
    for name in ("error_text", "error_code", "error_operation", "found"):
        getattr(lib, f"shim_{name}").restype = ctypes.c_char_p
    for name in ("engine_fallback", "plan_kind"):
        getattr(lib, f"shim_{name}").restype = ctypes.c_char_p
    for name in ("engine_open", "engine_stream", "plan_create", "stream_new"):
        getattr(lib, f"shim_{name}").restype = ctypes.c_void_p
    lib.shim_plan_table_bytes.restype = ctypes.c_size_t
    lib.shim_sizeof.restype = ctypes.c_size_t
    for number, struct in enumerate((Copy, View, Pointer)):
        assert lib.shim_sizeof(number) == ctypes.sizeof(struct), f"{struct.__doc__} has changed"
    for name in ("shape", "stream_chunks", "stream_fill", "stream_pack", "stream_unpack"):
        getattr(lib, f"shim_{name}").restype = ctypes.c_int64
    return lib


def check(status: int | None) -> None:
    """Raise NativeError unless `status` is 0 (or a handle that is not NULL)."""
    if status == 0:
        return
    lib = library()
    raise NativeError(
        lib.shim_error_code().decode(),
        lib.shim_error_operation().decode(),
        lib.shim_error_text().decode("utf-8", "replace"),
    )


def _handle(value: int | None) -> ctypes.c_void_p:
    if not value:
        check(-1)
    return ctypes.c_void_p(value)


def load_cuda() -> None:
    check(library().shim_cuda_load())


def load_nccl() -> None:
    check(library().shim_nccl_load())


def found(nccl: bool = False) -> tuple[str, str, str] | None:
    """Path, how it was found, version; None before the first load."""
    values = [library().shim_found(int(nccl), field) for field in range(3)]
    return None if values[0] is None else tuple(value.decode() for value in values)  # type: ignore[return-value]


def pointer(address: int) -> Pointer:
    info = Pointer()
    check(library().shim_pointer_query(ctypes.c_void_p(address), ctypes.byref(info)))
    return info


def make_copy(
    itemsize: int,
    shape: Sequence[int],
    source: tuple[int, int, Sequence[int]],
    destination: tuple[int, Sequence[int]],
) -> Copy | None:
    """One copy: source (base index, offset, strides) to destination (address, strides), in bytes.

    None when there is nothing to copy.
    """
    base, offset, src_strides = source
    address, dst_strides = destination
    copy = Copy(alloc=base, src_offset=offset, dst=address)
    dims = [(ctypes.c_int64 * DIMS)(*values) for values in (shape, src_strides, dst_strides)]
    written = library().shim_shape(ctypes.byref(copy), ctypes.c_size_t(itemsize), len(shape), *dims)
    return copy if written else None


def make_view(address: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> View:
    view = View(data=address, itemsize=itemsize, ndim=len(shape), device_type=1)
    view.shape[: len(shape)] = shape
    view.strides[: len(shape)] = strides
    return view


class Plan:
    """arl_cuda_plan_t"""

    def __init__(self, engine: Engine, copies: Sequence[Copy], bases: int, seconds: float) -> None:
        array = (Copy * max(len(copies), 1))(*copies)
        self.engine = engine
        self.handle = _handle(
            library().shim_plan_create(
                engine.handle, array, ctypes.c_int64(len(copies)), bases, ctypes.c_double(seconds)
            )
        )

    def run(self, bases: Sequence[int], stream: int | None = None) -> None:
        array = (ctypes.c_size_t * max(len(bases), 1))(*bases)
        stream = self.engine.stream if stream is None else stream
        check(library().shim_plan_run(self.handle, array, ctypes.c_void_p(stream)))

    @property
    def kind(self) -> str:
        return str(library().shim_plan_kind(self.handle).decode())

    @property
    def table_bytes(self) -> int:
        return int(library().shim_plan_table_bytes(self.handle))

    def close(self) -> None:
        if self.handle:
            library().shim_plan_free(self.handle)
            self.handle = ctypes.c_void_p()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Engine:
    """arl_cuda_engine_t"""

    def __init__(self, ordinal: int = 0, threads: int = 0, blocks_per_sm: int = 0) -> None:
        self.handle = _handle(library().shim_engine_open(ordinal, threads, blocks_per_sm))

    @property
    def stream(self) -> int:
        return library().shim_engine_stream(self.handle) or 0

    @property
    def fallback(self) -> str:
        return str(library().shim_engine_fallback(self.handle).decode())

    def drop_kernels(self) -> None:
        """Use the graph from now on, as if the kernels had not loaded."""
        library().shim_engine_drop_kernels(self.handle)

    def follow(self, stream: int) -> None:
        check(library().shim_engine_follow(self.handle, ctypes.c_void_p(stream)))

    def wait(self, seconds: float = 60, stream: int | None = None) -> None:
        stream = self.stream if stream is None else stream
        check(library().shim_wait(self.handle, ctypes.c_void_p(stream), ctypes.c_double(seconds)))

    def plan(self, copies: Sequence[Copy], bases: int = 1, seconds: float = 60) -> Plan:
        return Plan(self, copies, bases, seconds)

    def checksums(self, views: Sequence[View], seconds: float = 60) -> list[int]:
        array = (View * max(len(views), 1))(*views)
        sums = (ctypes.c_uint64 * max(len(views), 1))()
        status = library().shim_checksum(
            self.handle, array, ctypes.c_int64(len(views)), ctypes.c_double(seconds), sums
        )
        check(status)
        return list(sums)[: len(views)]

    def close(self) -> None:
        if self.handle:
            library().shim_engine_close(self.handle)
            self.handle = ctypes.c_void_p()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Stream:
    """arl_stream_t, of an offer with these tensors: (dtype number, shape, alias_of)."""

    def __init__(self, tensors: Sequence[tuple[int, Sequence[int], int]], chunk_bytes: int) -> None:
        count = len(tensors)
        shapes = (ctypes.c_int64 * (DIMS * max(count, 1)))()
        for i, (_, shape, _) in enumerate(tensors):
            shapes[i * DIMS : i * DIMS + len(shape)] = shape
        self.handle = _handle(
            library().shim_stream_new(
                ctypes.c_int64(count),
                (ctypes.c_int * max(count, 1))(*(dtype for dtype, _, _ in tensors)),
                (ctypes.c_int * max(count, 1))(*(len(shape) for _, shape, _ in tensors)),
                shapes,
                (ctypes.c_uint32 * max(count, 1))(*(alias for _, _, alias in tensors)),
                ctypes.c_int64(chunk_bytes),
            )
        )

    @property
    def chunks(self) -> int:
        return int(library().shim_stream_chunks(self.handle))

    def fill(self, chunk: int) -> int:
        return int(library().shim_stream_fill(self.handle, ctypes.c_int64(chunk)))

    def pack(self, chunk: int, views: Sequence[View], base: int) -> int:
        array = (View * max(len(views), 1))(*views)
        done = library().shim_stream_pack(
            self.handle, ctypes.c_int64(chunk), array, ctypes.c_void_p(base)
        )
        check(min(done, 0))
        return int(done)

    def unpack(self, chunk: int, copies: Sequence[Copy], base: int) -> int:
        array = (Copy * max(len(copies), 1))(*copies)
        done = library().shim_stream_unpack(
            self.handle,
            ctypes.c_int64(chunk),
            array,
            ctypes.c_int64(len(copies)),
            ctypes.c_void_p(base),
        )
        check(min(done, 0))
        return int(done)

    def close(self) -> None:
        if self.handle:
            library().shim_stream_free(self.handle)
            self.handle = ctypes.c_void_p()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
