"""Several processes that train one model: each holds a part of every parameter and reads a part of every batch (FSDP2).

`torchrun` starts the processes and tells each its number; without it there is one, for which all of this is nothing.
Gradients are summed in float32. What a step computes does not depend on the number of processes but for rounding, and
a checkpoint is that of one process, so a run may go on with another number.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from longspan.nn.llama import Llama
from longspan.text.packing import TextBatch
from longspan.train.config import OptimizerConfig, Precision
from longspan.train.matrices import from_owners, gathered, owned_by_each, owned_of, to_owners
from longspan.train.optimizers import Optimizer, momentum_name, moved, muon_update


class Processes(NamedTuple):
    """Which of how many processes this one is."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether it is the one that writes files and talks."""
        return self.rank == 0

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        return bool(self.total(torch.tensor(int(flag)))) if self.size > 1 else flag

    def wait(self) -> None:
        """Until all processes are here."""
        self.any(False)

    def share(self, batch: TextBatch) -> TextBatch:
        """This process's rows of a batch, as many as every other's: the last ones may not count."""
        if self.size == 1:
            return batch
        every = -(-len(batch.tokens) // self.size)
        rows = torch.arange(every) * self.size + self.rank
        counts = rows < len(batch.tokens)
        rows = rows.clamp_max(len(batch.tokens) - 1)
        documents = None if batch.documents is None else batch.documents[rows]
        return TextBatch(batch.tokens[rows], batch.targets[rows], batch.mask[rows] & counts[:, None], documents)


ALONE = Processes()


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[Processes, torch.device]]:
    """The processes that `torchrun` started, and the device of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE, device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # What lies on the host, a count or a wish to stop, is agreed upon without waiting for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size()), device
        _let_go()
    finally:
        dist.destroy_process_group()


def _let_go() -> None:
    """Wait until gloo's threads hold no tensor any more.

    They outlive the group, whose mesh stays in caches of torch, and a thread that lets go of a tensor while the
    interpreter ends takes the process with it: https://github.com/pytorch/pytorch/issues/190489.
    """
    last = torch.zeros(())
    for _ in range(2):  # there are two threads, and they take turns
        dist.all_reduce(last)
        end = time.monotonic() + 10
        while last._use_count() > 1 and time.monotonic() < end:  # type: ignore[attr-defined]
            time.sleep(0.001)


def recompute_blocks(model: Llama) -> None:
    """Keep only what enters each block, and run it again in the backward pass."""
    for block in model.blocks:
        block.forward = partial(recompute, block.forward, use_reentrant=False, preserve_rng_state=False)


def shard(model: Llama, processes: Processes, precision: Precision) -> None:
    """Leave each process its part of every parameter; a block is whole only while it runs.

    In bfloat16 the blocks travel and run so. The embedding, the last norm and the output stay in float32 under
    autocast, as on one GPU, and with them the residual stream.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (processes.size,))
    low = torch.bfloat16 if precision == "bfloat16" else None
    inner = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False))
    for part in model.modules():
        if isinstance(part, FSDPModule):  # sums, not means: the loss is divided by the tokens of all processes
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def reduce_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass ends with the sum over processes, or adds up on each."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def reshard(model: nn.Module) -> None:
    """After a forward pass that no backward pass followed."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


class ShardedOptimizer(Optimizer):
    """AdamW over the parts of a sharded model that lie on this process; Muon over the matrices that it owns."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, processes: Processes):
        self.whole = dict(model.named_parameters())
        self.processes = processes
        super().__init__(_Parts(self.whole), config)
        on_gpu = self.rate.is_cuda
        self._update = torch.compile(muon_update, dynamic=False) if on_gpu else muon_update

    def _shape(self, name: str) -> torch.Size:
        return self.whole[name].shape

    def _kept(self, count: int) -> int:
        return owned_by_each(count, self.processes.size)

    def _norm(self, norms: Tensor) -> Tensor:
        return self.processes.total(norms.square().sum()).sqrt()

    def _move_matrices(self, gradients: dict[str, Tensor], shrink: Tensor) -> None:
        """Each process orthogonalises the matrices it owns, and all get their rows of every update."""
        size, rate = self.processes.size, self.rate * self.config.muon_learning_rate
        for shape, names in self.muon_groups.items():
            parameters = [self.parameters[name].detach() for name in names]
            whole = to_owners([gradients[name] for name in names], shape[0], size)
            update = self._update(whole, self.momentum[shape], shrink, self.config)
            moved(parameters, from_owners(update, parameters, size), rate, self.config)

    def state(self) -> dict[str, Tensor]:
        """As of one process; every process must call it."""
        tensors = super().state()
        for shape, names in self.muon_groups.items():
            tensors[momentum_name(shape)] = gathered(self.momentum[shape], len(names), self.processes.size)
        return {name: self._gathered(name.partition(".")[2], tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take over this process's parts of the tensors of `state`."""
        matrices = {momentum_name(shape): momentum for shape, momentum in self.momentum.items()}
        for name, tensor in super().state().items():
            if name in matrices:
                tensor.copy_(owned_of(state[name], self.processes.rank, self.processes.size))
            else:
                tensor.copy_(self._part(name.partition(".")[2], state[name]))

    def load_parameters(self, state: dict[str, Tensor]) -> None:
        """The same for the parameters themselves."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._part(name, state[name]))

    def whole_parameters(self) -> dict[str, Tensor]:
        """On the host; every process must call it."""
        return {name: self._gathered(name, part.detach()) for name, part in self.parameters.items()}

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        like = self.whole.get(name)
        if not isinstance(like, DTensor):
            return part
        places = {"shape": like.shape, "stride": like.stride()}
        whole = DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **places).full_tensor()
        return whole.cpu() if self.processes.first else torch.empty(0)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        like = self.whole.get(name)
        if not isinstance(like, DTensor):
            return whole
        placed = whole.to(like.device)
        return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None).to_local()


class _Parts(nn.Module):
    """What of a model lies on this process, under the names of the whole and in the same memory."""

    def __init__(self, whole: dict[str, nn.Parameter]):
        super().__init__()
        self._named = {name: nn.Parameter(local(parameter.detach())) for name, parameter in whole.items()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this process."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
