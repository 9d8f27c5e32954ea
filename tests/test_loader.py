# SPDX-License-Identifier: Apache-2.0
"""How the CUDA driver and NCCL are found, and what is said when they are not.

Each case is a fresh process, as a library that was loaded stays. The libraries are stubs made
here, with the names and the symbols that the case wants.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fakes
import native

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent


def table(name: str) -> list[str]:
    """The symbols of one of the run-time tables, read from its header."""
    text = (ROOT / f"csrc/transport/{name}_api.h").read_text()
    return re.findall(r"^    X\((\w+), ", text, re.MULTILINE)


CUDA, NCCL = table("cuda"), table("nccl")


def stub(
    path: Path,
    symbols: list[str],
    version: tuple[str, int],
    soname: str | None = None,
    init: int = 0,
) -> Path:
    """A library whose functions return 0, but for the one that tells the version."""
    teller, number = version
    lines = [f"int {s}(void) {{ return 0; }}" for s in symbols if s not in (teller, "cuInit")]
    if teller in symbols:
        lines.append(f"int {teller}(int *v) {{ *v = {number}; return 0; }}")
    if "cuInit" in symbols:
        lines.append(f"int cuInit(unsigned f) {{ return f == 0 ? {init} : 1; }}")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text("\n".join(lines))
    command = [
        *os.environ.get("CC", "cc").split(),
        "-shared",
        "-fPIC",
        "-o",
        str(path),
        str(source),
    ]
    if soname is not None:
        command.append(f"-Wl,-soname,{soname}")
    subprocess.run(command, check=True, timeout=60)
    return path


def cuda(path: Path, version: int = 13000, soname: str | None = None, init: int = 0) -> Path:
    return stub(path, CUDA, ("cuDriverGetVersion", version), soname, init)


def nccl(path: Path, version: int = 22803, soname: str | None = None) -> Path:
    return stub(path, NCCL, ("ncclGetVersion", version), soname)


def load(code: str, **variables: str) -> str:
    """Run `code` with `native` imported, in a process without our variables but for these."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ARCTIC_RL_C", "FAKE_CUDA"))}
    clean.pop("CUDA_VISIBLE_DEVICES", None)
    native.build()  # here, so that the child finds it made
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{code}"],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TRY = """
import native
try:
    native.load_{name}()
    print(native.found({nccl}))
except native.NativeError as error:
    print(error.code, error.text)
"""
TRY_CUDA = TRY.format(name="cuda", nccl=False)
TRY_NCCL = TRY.format(name="nccl", nccl=True)


# ---- order --------------------------------------------------------------------------------------


def test_the_variable_comes_first(tmp_path: Path) -> None:
    """Also before a library that is in the process already."""
    inside = cuda(tmp_path / "libcuda.so.1", 12000, "libcuda.so.1")
    named = cuda(tmp_path / "named.so", 12080)
    found = load(
        f"import ctypes; ctypes.CDLL({str(inside)!r})\n{TRY_CUDA}",
        ARCTIC_RL_C_CUDA_DRIVER=str(named),
    )
    assert found == str((str(named), "environment variable", "12.8"))


def test_a_library_in_the_process_comes_before_the_system(tmp_path: Path) -> None:
    inside = cuda(tmp_path / "inside/libcuda.so.1", 12000, "libcuda.so.1")
    cuda(tmp_path / "system/libcuda.so.1", 12080, "libcuda.so.1")
    found = load(
        f"import ctypes; ctypes.CDLL({str(inside)!r})\n{TRY_CUDA}",
        LD_LIBRARY_PATH=str(tmp_path / "system"),
    )
    assert found == str((str(inside), "already in the process", "12.0"))


def test_a_bundled_library_is_found_under_its_hashed_name(tmp_path: Path) -> None:
    """As wheel repair names it; a plug-in of NCCL is not taken for it."""
    driver = cuda(tmp_path / "driver.so")
    plugin = nccl(tmp_path / "libnccl-net.so", soname="libnccl-net.so")
    inside = nccl(tmp_path / "libnccl-1a2b3c4d.so.2", soname="libnccl-1a2b3c4d.so.2")
    code = f"import ctypes; ctypes.CDLL({str(plugin)!r}); ctypes.CDLL({str(inside)!r})\n{TRY_NCCL}"
    found = load(code, ARCTIC_RL_C_CUDA_DRIVER=str(driver))
    assert found == str((str(inside), "already in the process", "2.28.3"))


def test_wheels_come_before_the_system(tmp_path: Path) -> None:
    driver = cuda(tmp_path / "driver.so")
    wheel = nccl(tmp_path / "site-packages/nvidia/nccl/lib/libnccl.so.2")
    nccl(tmp_path / "system/libnccl.so.2", 22000)
    root = str(tmp_path / "site-packages")
    code = f"import native; native.library().shim_add_root({root.encode()!r})\n{TRY_NCCL}"
    found = load(
        code, ARCTIC_RL_C_CUDA_DRIVER=str(driver), LD_LIBRARY_PATH=str(tmp_path / "system")
    )
    assert found == str((str(wheel), "nvidia wheel", "2.28.3"))


def test_site_packages_are_searched_for_wheels() -> None:
    code = "import arctic_rl_c; print(arctic_rl_c.show_config(as_dict=True)['wheel_roots'])"
    assert "site-packages" in load(code)


def test_the_system_comes_last(tmp_path: Path) -> None:
    there = cuda(tmp_path / "libcuda.so.1")
    found = load(TRY_CUDA, LD_LIBRARY_PATH=str(tmp_path))
    assert found == str((str(there), "system", "13.0"))


@pytest.mark.parametrize("version", [12000, 12090, 13000, 13030])
def test_cuda_12_and_13(tmp_path: Path, version: int) -> None:
    driver = cuda(tmp_path / "driver.so", version)
    found = load(TRY_CUDA, ARCTIC_RL_C_CUDA_DRIVER=str(driver))
    assert f"'{version // 1000}.{version % 1000 // 10}'" in found


@pytest.mark.parametrize(("version", "text"), [(21903, "2.19.3"), (23203, "2.32.3")])
def test_nccl_versions(tmp_path: Path, version: int, text: str) -> None:
    driver, library = cuda(tmp_path / "driver.so"), nccl(tmp_path / "nccl.so", version)
    variables = {"ARCTIC_RL_C_CUDA_DRIVER": str(driver), "ARCTIC_RL_C_NCCL": str(library)}
    assert f"'{text}'" in load(TRY_NCCL, **variables)


# ---- failures -----------------------------------------------------------------------------------


def test_a_missing_library_names_every_path_and_the_cure(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").write_text("no library")
    driver = cuda(tmp_path / "driver.so")
    code = f"import native; native.library().shim_add_root(b'/somewhere/site-packages')\n{TRY_NCCL}"
    text = load(code, ARCTIC_RL_C_CUDA_DRIVER=str(driver), LD_LIBRARY_PATH=str(tmp_path))
    assert text.startswith("ARL_ERR_UNAVAILABLE NCCL is not usable here; version 2.19.0 or later")
    assert "in the process: no libnccl.so*" in text
    assert "/somewhere/site-packages/nvidia/nccl/lib/libnccl.so.2: cannot open" in text
    assert f"{tmp_path}/libnccl.so.2: file too short" in text or "invalid ELF header" in text
    assert "arctic_rl_c[cuda13]" in text
    assert "ARCTIC_RL_C_NCCL=" in text


def test_a_named_file_that_does_not_do_is_not_replaced(tmp_path: Path) -> None:
    cuda(tmp_path / "libcuda.so.1")
    text = load(
        TRY_CUDA, ARCTIC_RL_C_CUDA_DRIVER="/nowhere/libcuda.so.1", LD_LIBRARY_PATH=str(tmp_path)
    )
    assert "/nowhere/libcuda.so.1: cannot open shared object file" in text
    assert "ARCTIC_RL_C_CUDA_DRIVER names that file, so nothing else was tried" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(("version", "text"), [(11080, "11.8"), (0, "0.0")])
def test_an_old_driver_is_refused_with_both_versions(
    tmp_path: Path, version: int, text: str
) -> None:
    driver = cuda(tmp_path / "driver.so", version)
    found = load(TRY_CUDA, ARCTIC_RL_C_CUDA_DRIVER=str(driver))
    assert "version 12.0 or later is needed" in found
    assert f"{driver} (environment variable): version {text}" in found
    assert "branch 525" in found


def test_all_missing_symbols_are_named_at_once(tmp_path: Path) -> None:
    driver = stub(tmp_path / "driver.so", CUDA[:5], ("cuDriverGetVersion", 12020))
    found = load(TRY_CUDA, ARCTIC_RL_C_CUDA_DRIVER=str(driver))
    assert f"version 12.2; {len(CUDA) - 5} missing:" in found
    for symbol in CUDA[5:]:
        assert symbol in found
    assert "cuDeviceGetUuid_v2 (since 11.4)" in found


def test_a_library_without_a_version_is_refused(tmp_path: Path) -> None:
    driver = stub(tmp_path / "driver.so", [], ("cuDriverGetVersion", 0))
    assert f"version unknown; {len(CUDA)} missing:" in load(
        TRY_CUDA, ARCTIC_RL_C_CUDA_DRIVER=str(driver)
    )


def test_nccl_too_old(tmp_path: Path) -> None:
    driver, library = cuda(tmp_path / "driver.so"), nccl(tmp_path / "nccl.so", 2804)
    variables = {"ARCTIC_RL_C_CUDA_DRIVER": str(driver), "ARCTIC_RL_C_NCCL": str(library)}
    assert "version 2.8.4" in load(TRY_NCCL, **variables)


def test_nccl_needs_the_driver() -> None:
    text = load(TRY_NCCL, ARCTIC_RL_C_CUDA_DRIVER="/nowhere")
    assert text.startswith("ARL_ERR_UNAVAILABLE NCCL needs the CUDA driver: the CUDA driver is not")


def test_a_driver_that_does_not_start(tmp_path: Path) -> None:
    driver = cuda(tmp_path / "driver.so", init=100)
    variables = {"ARCTIC_RL_C_CUDA_DRIVER": str(driver), "CUDA_VISIBLE_DEVICES": ""}
    text = load(TRY_CUDA, **variables)
    assert text.startswith("ARL_ERR_UNAVAILABLE cuInit: ")
    assert f"driver 13.0 ({driver}, environment variable) is there but does not start" in text
    assert 'CUDA_VISIBLE_DEVICES is ""' in text


def test_no_visible_device() -> None:
    with fakes.session() as env:
        text = load(TRY_CUDA, **env, CUDA_VISIBLE_DEVICES="")
        assert "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)" in text


# ---- again, and at once -------------------------------------------------------------------------


def test_a_failed_load_is_tried_again(tmp_path: Path) -> None:
    driver = cuda(tmp_path / "driver.so")
    code = f"{TRY_CUDA}\nimport os; os.environ['ARCTIC_RL_C_CUDA_DRIVER'] = {str(driver)!r}\n"
    first, second = load(code + TRY_CUDA, ARCTIC_RL_C_CUDA_DRIVER="/nowhere").rsplit("\n", 1)
    assert first.startswith("ARL_ERR_UNAVAILABLE")
    assert second == str((str(driver), "environment variable", "13.0"))


def test_threads_that_race_get_one_table(tmp_path: Path) -> None:
    driver, library = cuda(tmp_path / "driver.so"), nccl(tmp_path / "nccl.so")
    code = """
import native, threading
barrier = threading.Barrier(8)
native.library()
failures = []
def load():
    barrier.wait()
    try:
        native.load_nccl()
    except native.NativeError as error:
        failures.append(error)
threads = [threading.Thread(target=load) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(failures, native.found(True)[2])
"""
    variables = {"ARCTIC_RL_C_CUDA_DRIVER": str(driver), "ARCTIC_RL_C_NCCL": str(library)}
    assert load(code, **variables) == "[] 2.28.3"


def test_importing_loads_nothing() -> None:
    code = (
        "import arctic_rl_c\n"
        "text = open('/proc/self/maps').read()\n"
        "print([n for n in ('libcuda', 'libnccl', 'libcudart', 'libtorch') if n in text])"
    )
    assert load(code) == "[]"


# ---- show_config --------------------------------------------------------------------------------

SHOW = "import arctic_rl_c; arctic_rl_c.show_config()"


def test_show_config_without_a_driver() -> None:
    text = load(SHOW, ARCTIC_RL_C_CUDA_DRIVER="/nowhere")
    assert "CUDA driver     not available: the CUDA driver is not usable here" in text
    assert "/nowhere: cannot open shared object file" in text
    assert "NCCL            not looked for" in text
    assert "ARCTIC_RL_C_CUDA_DRIVER=/nowhere" in text


def test_show_config_with_devices() -> None:
    with fakes.session(devices="GPU,MIG,GPU") as env:
        text = load(SHOW, **env)
        assert "libfake_cuda.so  (environment variable)" in text
        assert "Fake GPU 0  GPU-10111213-1415-1617-1819-1a1b1c1d1e1f" in text
        assert "Fake GPU 1 MIG 1g" in text
        assert "compute capability 9.0, 3 multiprocessors, 1.0 GiB" in text
        assert "cuda_ipc: yes; reads the memory of devices: 2" in text
        assert "cuda_ipc: yes; reads the memory of devices: none" in text


def test_show_config_as_a_dict() -> None:
    code = "import arctic_rl_c, json; print(json.dumps(arctic_rl_c.show_config(as_dict=True{})))"
    with fakes.session(no_ipc=1, devices=1) as env:
        text = load(code.format(""), **env)
        assert '"cuda": {"available": true, "version": "13.0"' in text
        assert '"cuda_ipc": false, "cuda_ipc_reason": "cuIpcGetMemHandle: CUDA_ERROR_NOT_' in text
        assert '"devices"' not in load(code.format(", devices=False"), **env)


def test_doctor_shows_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "arctic_rl_c", "doctor"],
        env={**os.environ, "ARCTIC_RL_C_CUDA_DRIVER": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "CUDA driver     not available" in done.stdout
