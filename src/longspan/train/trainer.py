"""One training step, the same on every device; on a GPU it is captured in a CUDA graph, one for each length.

The batch of step i is a function of the run's seed and of i alone, so a run resumes exactly where it stopped without
saving the state of any generator. A batch holds sequences of one length, drawn anew each step: nothing is padding.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.nn.decoder import Decoder
from longspan.tasks import get_task
from longspan.tasks.base import Batch, counted_tail, stream_seed
from longspan.train.checkpoint import Checkpoint
from longspan.train.config import RunConfig, check, fingerprint, from_json, to_json
from longspan.train.copies import LowCopies
from longspan.train.noise import NoiseGate
from longspan.train.optimizers import Optimizer
from longspan.train.softening import soften


class Metrics(NamedTuple):
    """Means over the steps since the last look."""

    loss: float
    token_accuracy: float
    gradient_norm: float


class Trainer:
    """The state of a run and the step that moves it."""

    def __init__(self, config: RunConfig, device: torch.device | str = "cpu"):
        check(config)
        self.config, self.device = config, torch.device(device)
        self.task = get_task(config.task, **config.task_options)
        self.training_task = get_task(config.task, **(config.task_options | config.training_options))
        for task in (self.task, self.training_task):
            if task.vocabulary != config.model.vocabulary:
                raise ValueError(
                    f"{config.task} has {task.vocabulary} tokens, the model's vocabulary is {config.model.vocabulary}"
                )
            for length in (config.shortest, config.longest):
                task.check_length(length)
        for length in (*config.validate_lengths, *config.test_lengths):  # now, and not when the training is done
            self.task.check_length(length)
        torch.manual_seed(config.seed)
        self.model = Decoder(config.model).to(self.device)
        self.copies = LowCopies(self.model) if config.precision == "bfloat16" else None
        self.replica = self.model if self.copies is None else self.copies.model  # what computes
        self.optimizer = Optimizer(self.model, config.optimizer)
        self.average = (
            {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
            if config.average is not None
            else {}
        )
        self._flat = None
        if self.device.type == "cuda" and self.copies is not None:
            from longspan.train.flat import FlatStep

            self._flat = FlatStep(self.optimizer, self.copies, self.average, config.average)
        self.step = 0
        self.noise = NoiseGate(config, self.replica, self.device)
        self.generator = torch.Generator(self.device)
        self._sums = torch.zeros(4, device=self.device)  # loss, right, tokens, gradient norm
        self._since = 0
        self._tails: dict[int, int] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self._judge = judged_hidden
        self._ahead: tuple[int, int, Batch] | None = None  # a step, its length and its batch, drawn beforehand
        if self.device.type == "cuda":
            self._aside = torch.cuda.Stream(self.device)
            torch.set_float32_matmul_precision("high")
            # One block is compiled and serves every layer; the whole model as one graph takes minutes to compile.
            for block in self.replica.blocks:
                block.compile(dynamic=True)
            self.replica.embedded = torch.compile(self.replica.embedded, dynamic=True)  # type: ignore[method-assign]
            self._judge = torch.compile(judged_hidden, dynamic=True)

    def advance(self) -> None:
        """Take one step."""
        length, batch = self._batch()
        if soften(self.replica, self.config, self.step):
            self._graphs.clear()  # they hold the alpha before
        if self.noise:
            torch.manual_seed(stream_seed("noise", self.config.seed, self.step))
        self.optimizer.rate.fill_(learning_rate(self.step, self.config))
        if self.device.type == "cuda":
            self._update_from_graph(length, batch)
        else:
            self._update(length, batch)
        self.step += 1
        self._since += 1
        if self.device.type == "cuda" and self.step < self.config.steps:
            with torch.cuda.stream(self._aside):  # while the step runs
                self._ahead = self.step, *self.draw(self.step)

    def draw(self, step: int) -> tuple[int, Batch]:
        """The length and the batch of a step."""
        seed = stream_seed("train", self.config.seed, step)
        length = self.config.shortest + (seed >> 2) % (self.config.longest - self.config.shortest + 1)
        self.generator.manual_seed(seed)
        return length, self.training_task.sample(
            self.config.batch, length, generator=self.generator, device=self.device
        )

    def _batch(self) -> tuple[int, Batch]:
        """The length and the batch of this step, drawn ahead if it was."""
        if self._ahead is None or self._ahead[0] != self.step:
            return self.draw(self.step)
        _, length, batch = self._ahead
        torch.cuda.current_stream().wait_stream(self._aside)
        for part in batch:
            part.record_stream(torch.cuda.current_stream())
        return length, batch

    def metrics(self) -> Metrics:
        """The means since the last call; on a GPU this waits for the steps to end."""
        loss, right, tokens, norm = self._sums.tolist()
        steps, self._since = max(self._since, 1), 0
        self._sums.zero_()
        return Metrics(loss / steps, right / max(tokens, 1), norm / steps)

    def _loss(self, tokens: Tensor, targets: Tensor, mask: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """The mean loss over the positions that count, all among the last ones, and the counts of `judged`."""
        bf16 = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            hidden = self.replica.hidden(tokens, last=last)
            return self._judge(self.replica, hidden, targets[:, -last:], mask[:, -last:])

    def _update(self, length: int, batch: Batch) -> None:
        loss, counts = self._loss(*batch, self._tail(length, batch))
        names, parameters = zip(*self.replica.named_parameters(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        norm = self._flat.take(gradients) if self._flat is not None else self._moved(gradients)
        with torch.no_grad():
            if self.noise:
                self.noise.take(counts[1] / counts[2])
            self._sums += torch.cat([counts, norm[None]])

    @torch.no_grad()
    def _moved(self, gradients: dict[str, Tensor]) -> Tensor:
        """Move the weights, then their copies and averages; the norm of the gradient."""
        norm = self.optimizer.step(gradients if self.copies is None else self.copies.full(gradients))
        if self.copies is not None:
            self.copies.refresh()
        if self.average:
            decay = self.config.average
            assert decay is not None
            live = [parameter.detach() for parameter in self.model.parameters()]
            torch._foreach_lerp_(list(self.average.values()), live, 1 - decay)
        return norm

    def _update_from_graph(self, length: int, batch: Batch) -> None:
        """Replay the graph of this length. The first time the step runs as it is, and is then captured for the next."""
        if length in self._graphs:
            graph, room = self._graphs[length]
            for place, value in zip(room, batch, strict=True):
                place.copy_(value)
            graph.replay()
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._update(length, batch)
        torch.cuda.current_stream().wait_stream(aside)
        room = Batch(*(value.clone() for value in batch))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool()):
            self._update(length, room)
        self._graphs[length] = (graph, room)

    def _pool(self) -> Any:
        """One memory pool for all graphs: only one runs at a time."""
        return next(iter(self._graphs.values()))[0].pool() if self._graphs else None

    def _tail(self, length: int, batch: Batch) -> int:
        """How many of the last positions count; the same for every batch of a length."""
        if length not in self._tails:
            self._tails[length] = counted_tail(batch.mask)
        return self._tails[length]

    def checkpoint(self) -> Checkpoint:
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        tensors |= {f"noise.{name}": tensor for name, tensor in self.noise.state().items()}
        tensors |= {"log.sums": self._sums, "log.steps": torch.tensor(self._since)}
        return Checkpoint(self.step, to_json(self.config), tensors)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from `checkpoint`, which must come from the same config."""
        theirs = from_json(RunConfig, checkpoint.config)
        if fingerprint(theirs) != fingerprint(self.config):
            raise ValueError("the checkpoint comes from another config; start a new run to change a field")
        self.model.load_state_dict(_under("model.", checkpoint.tensors))
        if self.copies is not None:
            self.copies.refresh()
        for name, tensor in self.average.items():
            tensor.copy_(checkpoint.tensors[f"average.{name}"])
        self.noise.load(_under("noise.", checkpoint.tensors))
        self.optimizer.load(_under("optimizer.", checkpoint.tensors))
        self._sums.copy_(checkpoint.tensors["log.sums"])
        self.step, self._since = checkpoint.step, int(checkpoint.tensors["log.steps"])


def judged(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss where the mask is set; and to add up: that loss, how many answers are right, how many there are."""
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    counted = mask.sum()
    loss = (losses * mask.flatten()).sum() / counted
    right = ((logits.argmax(-1) == targets) & mask).sum()
    return loss, torch.stack([loss.detach(), right.float(), counted.float()])


def judged_hidden(model: Decoder, hidden: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`judged` from what the last block says: one function, so that one compilation holds norm, output and loss."""
    return judged(model.logits(hidden), targets, mask)


def learning_rate(step: int, config: RunConfig) -> float:
    """Warm-up, then a cosine to zero, as a fraction of the peak."""
    warmup = min(1.0, (step + 1) / max(config.optimizer.warmup, 1))
    return warmup * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def model_of(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> tuple[Decoder, RunConfig]:
    """The model a checkpoint holds, rebuilt from its own config; the averaged weights if there are any."""
    config = from_json(RunConfig, checkpoint.config)
    model = Decoder(config.model)
    prefix = "average." if config.average is not None else "model."
    model.load_state_dict(_under(prefix, checkpoint.tensors))
    soften(model, config, max(checkpoint.step - 1, 0))  # the alpha of the step that made it
    return model.to(device).eval(), config


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
