"""torchtitan's own trainer, told that a CPU is a device; `test_torchtitan` runs it with torchrun's variables."""

import types

import torch
import torchtitan.tools.utils as utils


class _Device(types.ModuleType):
    """What torchtitan asks of `torch.cuda`, answered for a CPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name, lambda *arguments, **options: 0)


device = _Device("cpu_device")
device.current_device = lambda: 0  # type: ignore[attr-defined]
device.get_device_name = lambda *arguments: "cpu"  # type: ignore[attr-defined]
device.get_device_properties = lambda *arguments: types.SimpleNamespace(total_memory=1 << 30)  # type: ignore[attr-defined]
device.memory_stats = lambda *arguments: {}  # type: ignore[attr-defined]
utils.device_type, utils.device_module = "cpu", device

import torchtitan.distributed.utils as distributed  # noqa: E402  (it reads the device when it is imported)

distributed.set_pg_timeouts = lambda *arguments, **options: None  # NCCL's
torch.set_num_threads(1)

if __name__ == "__main__":
    from torchtitan.train import main

    main()
