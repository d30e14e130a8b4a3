"""What a newcomer's machine needs, and what it does not."""

import subprocess
import sys

import pytest

# Everything beyond torch is made unimportable before longspan is imported.
ABSENT = ("triton", "typer", "rich", "matplotlib", "entmax", "safetensors", "transformers", "hypothesis")

IMPORT = f"""
import sys, time
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name, name=name)
import torch
sys.meta_path.insert(0, Absent())
before = set(sys.modules)
start = time.process_time()
import longspan
took = time.process_time() - start
p = longspan.entmax(torch.tensor([1.0, 0.5, -3.0]))
q = torch.randn(1, 2, 5, 8)
assert longspan.attention(q, q, q).shape == q.shape and p[2] == 0
foreign = sorted({{n.split(".")[0] for n in set(sys.modules) - before}} - {{"longspan"}} - set(sys.stdlib_module_names))
print(took, ",".join(foreign))
"""


def import_longspan() -> tuple[float, str]:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    took, _, foreign = run.stdout.strip("\n").partition(" ")
    return float(took), foreign


def test_import_needs_only_torch_and_less_than_a_second() -> None:
    runs = [import_longspan() for _ in range(3)]
    assert runs[0][1] == "", "importing longspan pulled in more than torch"
    assert min(took for took, _ in runs) < 1.0


def test_the_command_line_says_what_it_needs() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import longspan.cli"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "pip install 'longspan[cli,train,plots]'" in run.stderr


def test_every_public_name_exists_and_is_documented() -> None:
    import longspan

    for name in longspan.__all__:
        assert getattr(longspan, name).__doc__, name


@pytest.mark.parametrize("room", ["functional", "nn"])
def test_rooms_export_what_they_list(room: str) -> None:
    import importlib

    module = importlib.import_module(f"longspan.{room}")
    assert all(hasattr(module, name) for name in module.__all__)
    assert list(module.__all__) == sorted(
        module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
