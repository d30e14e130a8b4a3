"""A run of a language model from its config to its last checkpoint: logs, validation, and a clean end."""

import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch

from longspan.nn.llama import flops_per_token
from longspan.results import Row, append_rows, provenance, write_whole
from longspan.train import checkpoint as checkpoints
from longspan.train.config import from_json, read_fields, to_json
from longspan.train.distributed import ALONE, Processes
from longspan.train.lm import LanguageConfig, LanguageTrainer, fingerprint, learning_rate
from longspan.train.loop import Diverged, Outcome, Report, Stop, alone_in, failures_told

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def run_language(
    config: LanguageConfig,
    folder: Path,
    device: torch.device | str,
    report: Report,
    stop: Stop,
    processes: Processes = ALONE,
) -> Outcome:
    """Train `config` in `folder`, going on from its last checkpoint if it has one.

    `report` gets a row for every entry of the log, which goes to ``log.jsonl`` too. Of several processes, which must
    see one folder, the first one writes and reports.
    """
    import numpy  # noqa: F401  (safetensors writes by it; missing, both are missed now and not at the first checkpoint)
    import safetensors  # noqa: F401

    trainer = LanguageTrainer(config, device, processes)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_another(folder, config)
    with alone_in(folder) if processes.first else nullcontext():
        return _run(trainer, folder, report, stop)


def _run(trainer: LanguageTrainer, folder: Path, report: Report, stop: Stop) -> Outcome:
    config, processes = trainer.config, trainer.processes
    if processes.first:
        write_whole(folder / "config.json", json.dumps(to_json(config), indent=2) + "\n")
    saved = checkpoints.saved(folder / "checkpoints")
    if saved:
        trainer.restore(checkpoints.load(saved[-1]))

    def note(row: Row) -> None:
        if not processes.first:
            return
        append_rows(folder / "log.jsonl", [row])
        report(row)

    note({"event": "start", "step": trainer.step, **provenance(trainer.device), "processes": processes.size})
    started, first = time.monotonic(), trainer.step
    with failures_told(note, lambda: trainer.step):
        _train(trainer, folder, note, stop)
        path = saved[-1] if saved and trainer.step == first else _save(trainer, folder)
    ending: Literal["finished", "stopped"] = "finished" if trainer.step >= config.steps else "stopped"
    note({"event": ending, "step": trainer.step, "seconds": time.monotonic() - started})
    return Outcome(ending, trainer.step, path)


def _train(trainer: LanguageTrainer, folder: Path, note: Report, stop: Stop) -> None:
    config = trainer.config
    logged, logged_step = time.monotonic(), trainer.step
    while trainer.step < config.steps and not trainer.processes.any(stop.wanted):
        trainer.advance()
        ended = trainer.step == config.steps
        if trainer.step % config.log_every == 0 or ended:
            _log(trainer, note, logged_step, logged)
            logged, logged_step = time.monotonic(), trainer.step
        validating = ended or trainer.step % config.validate_every == 0
        saving = trainer.step % config.save_every == 0 and not ended
        if validating:
            _validate(trainer, note)
        if saving:  # after the validation: who goes on from this step must have had it
            _save(trainer, folder)
        if validating or saving:
            logged, logged_step = time.monotonic(), trainer.step  # neither is training time


def _refuse_another(folder: Path, config: LanguageConfig) -> None:
    """Raises ValueError where the folder holds another run."""
    path = folder / "config.json"
    if path.exists():
        theirs = read_fields(path)
        if "task" in theirs or fingerprint(from_json(LanguageConfig, theirs)) != fingerprint(config):
            raise ValueError(f"{folder} holds a run of another config; choose another folder or delete it")


def _log(trainer: LanguageTrainer, note: Report, since_step: int, since: float) -> None:
    metrics = trainer.metrics()  # waits for the device, so the clock is read after it
    speed = (trainer.step - since_step) * trainer.tokens_a_step / max(time.monotonic() - since, 1e-9)
    flops = speed * flops_per_token(trainer.config.model, trainer.config.context)
    peak = peak_flops(trainer.device)
    row = {
        "event": "train",
        "step": trainer.step,
        **metrics._asdict(),
        "rate": learning_rate(trainer.step - 1, trainer.config),
        "tokens": trainer.step * trainer.tokens_a_step,
        "tokens_per_second": speed,
        "flops_per_second": flops,
        "utilisation": None if peak is None else flops / (peak * trainer.processes.size),
    }
    note(row)
    if not math.isfinite(metrics.loss):
        raise Diverged(
            f"the loss is {metrics.loss} after {trainer.step} steps; the checkpoints before it are kept. "
            "A lower learning rate, a longer warm-up or gradient clipping may help."
        )


def peak_flops(device: torch.device) -> float | None:
    """The dense bfloat16 rate that the maker tells of a GPU, where it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for model, peak in _PEAK_FLOPS.items() if model in name), None)


def _save(trainer: LanguageTrainer, folder: Path) -> Path:
    """A broken checkpoint must not push out a good one."""
    if name := trainer.broken():
        raise Diverged(f"{name} is not finite after {trainer.step} steps; the checkpoints before it are kept")
    checkpoint = trainer.checkpoint()
    if trainer.processes.first:
        checkpoints.save(folder / "checkpoints", checkpoint)
    trainer.processes.wait()
    return checkpoints.saved(folder / "checkpoints")[-1]


def _validate(trainer: LanguageTrainer, note: Report) -> None:
    loss = trainer.validation_loss()
    perplexity = math.exp(loss) if loss < 700 else math.inf
    note({"event": "validate", "step": trainer.step, "loss": loss, "perplexity": perplexity})
