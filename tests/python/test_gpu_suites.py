"""What of the GPU suites can be tested without a GPU: the checkpoints they write, the results they
keep, and that a machine without a GPU is told so."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

GPU = pathlib.Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))

import checkpoint  # noqa: E402
import machine  # noqa: E402
import model  # noqa: E402
import report  # noqa: E402


def run(*args, **environment):
    command = [str(GPU / "run.sh"), *map(str, args)]
    variables = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)


def test_a_checkpoint_is_read_back_and_a_changed_byte_is_found(tmp_path):
    sizes = [0, 1, 8, 257, checkpoint.BLOCK - 8, checkpoint.BLOCK, checkpoint.BLOCK + 9]
    tensors = [checkpoint.flat(f"layers.{at}.weight", size) for at, size in enumerate(sizes)]
    tensors.append(checkpoint.Tensor("norm.weight", "BF16", (3, 5)))
    path = tmp_path / "model.safetensors"
    assert checkpoint.write(path, tensors, 7) == sum(sizes) + 30
    assert checkpoint.first_difference(path, tensors, 7) is None
    before = path.stat().st_mtime_ns
    checkpoint.write(path, tensors, 7)
    assert path.stat().st_mtime_ns == before
    assert checkpoint.first_difference(path, tensors, 8) is not None
    with path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"\xff")
    assert checkpoint.first_difference(path, tensors, 7).startswith("layers.6.weight")


def test_a_checkpoint_has_the_header_that_safetensors_has(tmp_path):
    tensors = [checkpoint.Tensor("a", "BF16", (2, 3)), checkpoint.flat("b", 5)]
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, tensors, 1)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["a"] == {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    assert header["b"] == {"dtype": "U8", "shape": [5], "data_offsets": [12, 17]}
    assert len(data) == 8 + length + 17


def test_the_bytes_are_small_bf16_numbers():
    block = checkpoint.block()
    assert set(block[1 : 2 * checkpoint.BLOCK : 2]) == {0x3C, 0xBC}


def test_tensors_begin_at_places_of_their_own():
    starts = {checkpoint.start(seed, f"layers.{at}") for at in range(64) for seed in range(4)}
    assert len(starts) == 256


def test_the_model_is_the_workload():
    linears = model.linears()
    assert sum(tensor.bytes for tensor in linears) == 13_958_643_712
    assert len(model.norms()) == 65
    assert model.layers_of(linears)[6] == (
        "layers.0.down_proj",
        ["layers.0.down_proj.weight"],
    )


@pytest.mark.parametrize("suite", ["contract", "correctness", "faults", "adoption", "speed"])
def test_a_machine_without_a_gpu_is_told_so(suite, tmp_path):
    if machine.gpu()[0]:
        pytest.skip("there is a GPU")
    answer = run("--suite", suite, "--bin", tmp_path, "--out", tmp_path / "out")
    assert answer.returncode == 1, answer.stderr
    assert "no NVIDIA GPU to test on" in answer.stderr
    last = answer.stdout.splitlines()[-1]
    assert last.startswith("0 passed, ") and last.endswith(" failed, 0 skipped")
    # nothing is noted as done
    assert not list((tmp_path / "out").glob("cases/*"))


def result(case, outcome="passed"):
    made = report.Result("contract", case, seconds=1.5)
    made.check("rate", 5, "GB/s", at_least=4)
    if outcome == "failed":
        made.check("gap", 9, "µs", at_most=8)
    return made


def fake_contract(folder):
    """A binary that lists three tests, of which one fails."""
    binary = folder / "device_contract"
    binary.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--list) printf 'one: test\\nmod::two: test\\nthree: test\\n\\n3 tests\\n';;\n"
        "three) echo \"thread 'three' panicked at x\"; exit 101;;\n"
        f"*) echo ran \"$1\" >>{folder}/ran; echo 'test result: ok. 1 passed; 0 failed';;\n"
        "esac\n"
    )
    binary.chmod(0o755)


def test_what_is_done_is_not_done_again(tmp_path):
    fake_contract(tmp_path)
    args = ["--suite", "contract", "--bin", tmp_path, "--out", tmp_path / "out"]
    args += ["--no-grow", "--device", "none"]
    answer = run(*args)
    assert answer.returncode == 1, answer.stderr
    assert answer.stdout.splitlines()[-1] == "2 passed, 1 failed, 0 skipped"
    ran = (tmp_path / "ran").read_text()
    assert ran == "ran one\nran mod::two\n"
    again = run(*args)
    assert again.stdout.splitlines()[-1] == "2 passed, 1 failed, 0 skipped"
    assert "one: passed before" in again.stdout and "three: failed before" in again.stdout
    assert (tmp_path / "ran").read_text() == ran
    assert "three ..." in run(*args, "--retry").stdout
    run(*args, "--fresh")
    assert (tmp_path / "ran").read_text() == ran * 2
    suite = json.loads((tmp_path / "out" / "contract.json").read_text())
    assert suite["summary"] == "2 passed, 1 failed, 0 skipped"
    failed = next(case for case in suite["cases"] if case["case"] == "three")
    assert "panicked" in failed["reason"]


def test_a_case_that_hangs_is_ended(tmp_path):
    binary = tmp_path / "device_contract"
    binary.write_text(
        "#!/bin/sh\n"
        "[ \"$1\" = --list ] && { printf 'one: test\\n'; exit; }\n"
        f"echo $$ >{tmp_path}/pid; exec sleep 600\n"
    )
    binary.chmod(0o755)
    args = ["--suite", "contract", "--bin", tmp_path, "--out", tmp_path / "out"]
    answer = run(*args, "--no-grow", "--device", "none", "--limit", "8")
    assert answer.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
    assert "not done within" in answer.stdout
    pid = (tmp_path / "pid").read_text().strip()
    stat = pathlib.Path("/proc", pid, "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "cases" / "one.json"
    for outcome in ("passed", "failed"):
        made = result("one", outcome)
        assert made.outcome == outcome
        made.write(path)
        assert report.Result.read(path) == made
    table = report.table([result("one"), result("two", "failed")])
    assert "missed" in table and "<= 8" in table
    assert report.last_line([result("one")]) == "1 passed, 0 failed, 0 skipped"


def test_memory_is_written_and_freed():
    assert "written and freed" in machine.grow(64 << 20)
