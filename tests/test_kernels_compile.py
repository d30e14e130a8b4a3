"""The interpreter forgives what the compiler does not: every kernel is compiled for a GPU, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parent / "compile_kernels.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "short_backward" in run.stdout


def test_no_kernel_for_long_rows_spills_more_than_400_bytes(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parent / "count_spills.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    assert len(lines) == 30
    assert not [line for line in lines if int(line.split()[0]) > 400]
