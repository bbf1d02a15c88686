"""The machine: its memory, its shared memory, its GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

GIB = 1 << 30
MIB = 1 << 20
SHM = pathlib.Path("/dev/shm")


def memory() -> str:
    """What the kernel says of its memory."""
    wanted = ("MemTotal", "MemAvailable", "Shmem")
    fields = {}
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in wanted:
            fields[name] = f"{int(value.split()[0]) / (1 << 20):.1f} GiB"
    return ", ".join(f"{name} {fields[name]}" for name in wanted)


def enlarge_shm(wanted: int) -> str:
    """Enlarges /dev/shm to `wanted` bytes if it is smaller and we may."""
    before = shutil.disk_usage(SHM)
    said = f"/dev/shm: {before.total / GIB:.1f} GiB, {before.free / GIB:.1f} GiB free"
    if before.free >= wanted:
        return said
    command = ["mount", "-o", f"remount,size={before.used + wanted}", str(SHM)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        problem = answer.stderr.strip() if answer.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        return f"{said}; {wanted / GIB:.1f} GiB are wanted, and it may not be enlarged: {problem}"
    return f"{said}; enlarged, {shutil.disk_usage(SHM).free / GIB:.1f} GiB free"


def touch(size: int, threads: int) -> None:
    """Writes that many bytes of memory and frees them."""
    area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anchor = ctypes.c_char.from_buffer(area)
    begin = ctypes.addressof(anchor)
    share = size // threads

    def write(index: int) -> None:
        ctypes.memset(begin + index * share, 1, share)

    workers = [threading.Thread(target=write, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    del anchor
    area.close()


def grow(size: int) -> str:
    """Has a process of its own write and free that many bytes: a virtual machine may get
    its memory only while it is first written."""
    began = time.monotonic()
    threads = min(16, len(os.sched_getaffinity(0)))
    script = f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); "
    # when there is not so much, this process is the one to go
    script += "open('/proc/self/oom_score_adj', 'w').write('1000'); "
    script += f"import machine; machine.touch({size}, {threads})"
    before = memory()
    try:
        code = subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    said = "written and freed" if code == 0 else f"could not be written (exit {code})"
    seconds = time.monotonic() - began
    return f"memory: {before}\n        {size / GIB:.1f} GiB {said} in {seconds:.1f} s: {memory()}"


def gpu() -> tuple[str, str]:
    """The first GPU by name, driver and memory; or, second, why there is none."""
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.strip().splitlines()[0], ""
        reason = (answer.stdout + answer.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    script = "import torch; print(torch.cuda.get_device_name(0), torch.version.cuda)"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    if answer.returncode == 0:
        return answer.stdout.strip(), ""
    last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
    return "", f"no NVIDIA GPU to test on: nvidia-smi: {reason}; torch: {last}"


def module(path: pathlib.Path, room: pathlib.Path) -> pathlib.Path:
    """A folder to import the package `flextensord` from, out of a wheel, a folder with one, the
    package, or the bare extension module."""
    import zipfile

    if path.is_dir() and (path / "flextensord" / "__init__.py").exists():
        return path
    wheels = [path] if path.suffix == ".whl" else sorted(path.glob("*.whl"))
    site = room / "site"
    shutil.rmtree(site, ignore_errors=True)
    if wheels:
        zipfile.ZipFile(wheels[-1]).extractall(site)
        return site
    bare = [path] if path.is_file() else [*path.glob("_native*.so"), *path.glob("lib_native.so")]
    if not bare:
        raise FileNotFoundError(
            f"{path} holds no wheel, no package flextensord, no _native.abi3.so"
        )
    source = pathlib.Path(__file__).resolve().parents[2] / "client-py" / "python" / "flextensord"
    shutil.copytree(source, site / "flextensord")
    shutil.copy(bare[0], site / "flextensord" / "_native.abi3.so")
    return site
