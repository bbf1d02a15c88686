"""Runs a suite: each case in a process of its own with a time limit, its result in a file. See
run.sh for the command line."""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import machine
import report
from bench import Bench
from report import Result, Skip

ROOT = pathlib.Path(__file__).resolve().parents[2]
# bytes of memory, and of those in /dev/shm, that the cases of a suite need at the same time
NEEDS = {
    "adoption": (34 * machine.GIB, 30 * machine.GIB),
    "contract": (2 * machine.GIB, 1 * machine.GIB),
    "correctness": (10 * machine.GIB, 6 * machine.GIB),
    "faults": (10 * machine.GIB, 6 * machine.GIB),
    "speed": (56 * machine.GIB, 44 * machine.GIB),
}
SUITE_LIMIT = 8 * 60


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh", description="suites that need a GPU")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    parser.add_argument("--suite", required=True, choices=sorted(NEEDS))
    parser.add_argument("--bin", type=pathlib.Path, default=target, help="prebuilt binaries")
    parser.add_argument("--module", "--wheel", type=pathlib.Path, help="the Python module")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / ".cache" / "gpu")
    parser.add_argument("--fresh", action="store_true", help="run all cases again")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--limit", type=float, default=SUITE_LIMIT, help="seconds for the suite")
    parser.add_argument("--no-grow", action="store_true", help="leave memory and /dev/shm alone")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--room", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--shm", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def cases_of(options: argparse.Namespace) -> dict:
    """The cases of the suite; those of the contract are the tests of its binary."""
    suite = importlib.import_module(options.suite)
    if hasattr(suite, "find"):
        suite.find(options.bin)
    return suite.SUITE.cases


def run_case(options: argparse.Namespace) -> int:
    """Runs one case in this process, and writes its result."""
    case = cases_of(options)[options.run]
    result = Result(options.suite, case.name)
    began = time.monotonic()
    try:
        with Bench(
            result, options.bin, options.room, options.shm, options.kept, options.device
        ) as bench:
            case.work(bench)
    except Skip as reason:
        result.outcome, result.reason = "skipped", str(reason)
    except Exception as error:  # a case may fail in any way
        result.fail(f"{type(error).__name__}: {error}")
        result.notes["traceback"] = traceback.format_exc()
    result.seconds = round(time.monotonic() - began, 2)
    result.write(options.room / "result.json")
    # contexts that have faulted may not let the interpreter end in order
    sys.stdout.flush()
    os._exit(0)


def start(options: argparse.Namespace, name: str, limit: float) -> Result:
    """Runs a case in a process of its own, and kills what is left of it."""
    room = pathlib.Path(tempfile.mkdtemp(prefix="ftg-"))
    shm = pathlib.Path(tempfile.mkdtemp(prefix=f"ftg-{os.getpid()}-", dir=machine.SHM))
    command = [sys.executable, __file__, "--suite", options.suite, "--run", name]
    command += ["--bin", options.bin, "--room", room, "--shm", shm, "--kept", options.kept]
    command += ["--device", options.device]
    began = time.monotonic()
    process = subprocess.Popen([str(part) for part in command], start_new_session=True)
    late = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        # the case, its daemons and its peers: one process group, made above
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = process.wait()
    seconds = round(time.monotonic() - began, 2)
    written = room / "result.json"
    if written.exists() and not late:
        result = Result.read(written)
    else:
        result = Result(options.suite, name)
        result.fail(f"not done within {limit:.0f} s" if late else f"ended with {code}")
    result.seconds = seconds
    if result.outcome == "failed":
        logs = sorted(room.glob("*/daemon.log"))
        tails = ["\n".join(log.read_text(errors="replace").splitlines()[-40:]) for log in logs]
        result.daemon_log = "\n--\n".join(tails)
    shutil.rmtree(room, ignore_errors=True)
    shutil.rmtree(shm, ignore_errors=True)
    return result


def sweep() -> None:
    """Removes what runs that were killed have left in shared memory."""
    for folder in machine.SHM.glob("ftg-*-*"):
        owner = folder.name.split("-")[1]
        if not pathlib.Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def prepare(options: argparse.Namespace) -> dict[str, str]:
    """Sees to memory and module, and says what the machine is."""
    said = {"python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d")}
    said["command"] = " ".join(["tests/gpu/run.sh", *sys.argv[1:]])
    said["kernel"] = os.uname().release
    said["cores"] = str(len(os.sched_getaffinity(0)))
    if options.device == "cuda":
        said["gpu"], said["no_gpu"] = machine.gpu()
        if said["no_gpu"]:
            return said
    sweep()
    if not options.no_grow:
        memory, shm = NEEDS[options.suite]
        said["shm"] = machine.enlarge_shm(shm)
        said["memory"] = machine.grow(memory)
    if options.module:
        site = machine.module(options.module, options.out)
        search = [str(site), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in search if part)
    for name, text in said.items():
        if text:
            print(f"{name}: {text}" if name != "memory" else text, flush=True)
    return said


def finished(options: argparse.Namespace, path: pathlib.Path) -> Result | None:
    """The result of a case that need not run again."""
    if options.fresh or not path.exists():
        return None
    result = Result.read(path)
    return None if options.retry and result.outcome == "failed" else result


def main(argv: list[str]) -> int:
    options = arguments(argv)
    options.bin = options.bin.resolve()
    if options.run:
        return run_case(options)
    names = [name for name in cases_of(options) if options.only in name]
    if options.list:
        print("\n".join(names))
        return 0
    began = time.monotonic()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.kept = machine.SHM / "flextensord-gpu-tests"
    files = {name: options.out / "cases" / f"{options.suite}.{name}.json" for name in names}
    results: dict[str, Result] = {}
    for name, path in files.items():
        result = finished(options, path)
        if result is not None:
            results[name] = result
    machine_says: dict[str, str] = {}
    if len(results) < len(names):
        machine_says = prepare(options)
    no_gpu = machine_says.get("no_gpu", "")
    if no_gpu:
        print(no_gpu, file=sys.stderr)
    for name in names:
        if name in results:
            print(f"{name}: {results[name].outcome} before", flush=True)
            continue
        limit = importlib.import_module(options.suite).SUITE.cases[name].limit
        left = options.limit - (time.monotonic() - began)
        if no_gpu or left < 5:
            # nothing is written: the next run takes it up
            reason = no_gpu or "no time left: run the suite again to go on"
            results[name] = Result(options.suite, name)
            results[name].fail(reason)
            continue
        print(f"{name} ...", flush=True)
        result = start(options, name, min(limit, left))
        if left >= limit or result.outcome == "passed":
            result.write(files[name])
        results[name] = result
        print(f"{name}: {result.outcome} in {result.seconds} s {result.reason[:400]}", flush=True)
        ordered = [results[each] for each in names if each in results]
        report.write_suite(options.out / f"{options.suite}.json", machine_says, ordered)
    if not no_gpu and all(name in results for name in names) and not options.only:
        shutil.rmtree(options.kept, ignore_errors=True)
    ordered = [results[name] for name in names]
    print()
    print(report.table(ordered))
    print(f"{options.suite}: {time.monotonic() - began:.0f} s")
    print(report.last_line(ordered))
    return 1 if any(result.outcome == "failed" for result in ordered) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
