"""What every test shares: the device, and settings that keep parallel runs quick and repeatable."""

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

# Every xdist worker would otherwise start a thread per core and they would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Triton reads it once, when a kernel is defined: on a CPU kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        import interpreter_of_tests

        interpreter_of_tests.install()

settings.register_profile("longspan", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("longspan")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """What a test draws without a seed of its own does not hang on the tests before it."""
    torch.manual_seed(0)
