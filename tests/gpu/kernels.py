"""Two kernels that look at the GPU's own clock: one when it starts, one when bytes arrive."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import tempfile

from link import checked

SOURCE = r"""
__device__ unsigned long long now() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}
extern "C" __global__ void stamp(unsigned long long *out) { *out = now(); }
// each thread watches the last word of its piece of the part; the time is that of the last one
extern "C" __global__ void watch(const volatile unsigned long long *part,
                                 const unsigned long long *wanted, unsigned int piece,
                                 unsigned long long limit, unsigned long long *out) {
    unsigned int at = (threadIdx.x + 1) * piece - 1;
    unsigned long long begin = now(), want = wanted[at];
    int late = 0;
    if (threadIdx.x == 0) out[1] = begin;
    while (part[at] != want && !late) late = now() - begin > limit;
    late = __syncthreads_or(late);
    if (threadIdx.x == 0) out[0] = late ? 0 : now();
}
// how far the clock moves from one reading to the next that differs
extern "C" __global__ void tick(unsigned long long *out) {
    unsigned long long first = now(), next = first;
    while (next == first) next = now();
    first = next;
    while (next == first) next = now();
    *out = next - first;
}
"""


def _image(capability: tuple[int, int]) -> bytes:
    """The kernels as PTX, by the run-time compiler or else by nvcc."""
    target = f"compute_{capability[0]}{capability[1]}"
    try:
        from cuda.bindings import nvrtc

        program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"watch.cu", 0, [], []))
        options = [f"--gpu-architecture={target}".encode()]
        checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        size = checked(nvrtc.nvrtcGetPTXSize(program))
        image = b" " * size
        checked(nvrtc.nvrtcGetPTX(program, image))
        return image
    except Exception as refused:  # a library that is missing may say so in any way
        with tempfile.TemporaryDirectory() as folder:
            source, ptx = pathlib.Path(folder, "watch.cu"), pathlib.Path(folder, "watch.ptx")
            source.write_text(SOURCE)
            command = ["nvcc", "-ptx", f"-arch={target}", "-o", str(ptx), str(source)]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=60)
            except (OSError, subprocess.SubprocessError) as error:
                raise RuntimeError(f"no compiler for kernels: {refused}; {error}") from error
            return ptx.read_bytes() + b"\0"


class Kernels:
    """The kernels, in torch's context."""

    def __init__(self) -> None:
        import torch
        from cuda.bindings import driver

        torch.zeros(1, device="cuda")
        self.driver = driver
        self.module = checked(driver.cuModuleLoadData(_image(torch.cuda.get_device_capability())))
        names = ("stamp", "watch", "tick")
        self.functions = {
            name: checked(driver.cuModuleGetFunction(self.module, name.encode())) for name in names
        }

    def launch(self, name: str, stream: int, threads: int, values: tuple, types: tuple) -> None:
        code = self.driver.cuLaunchKernel(
            self.functions[name], 1, 1, 1, threads, 1, 1, 0, stream, (values, types), 0
        )
        if int(code[0]):
            raise RuntimeError(f"launch {name}: error {int(code[0])}")

    def stamp(self, stream: int, out: int) -> None:
        """Writes the time of its start."""
        self.launch("stamp", stream, 1, (out,), (ctypes.c_void_p,))

    def watch(
        self, stream: int, part: int, wanted: int, bytes_: int, pieces: int, out: int
    ) -> None:
        """Writes the time at which the last word of each piece is as wanted, or 0 after a second;
        behind it, the time of its own start."""
        values = (part, wanted, bytes_ // 8 // pieces, 1_000_000_000, out)
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_ulonglong)
        self.launch("watch", stream, pieces, values, (*kinds, ctypes.c_void_p))

    def tick(self, stream: int, out: int) -> None:
        """Writes how coarse the clock is."""
        self.launch("tick", stream, 1, (out,), (ctypes.c_void_p,))
