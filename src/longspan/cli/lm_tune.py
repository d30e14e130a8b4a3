"""`longspan lm tune`: a short fine-tuning on needles."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longspan.cli.console import console, fail
from longspan.cli.lm_measure import CorpusFolder, Device, Run, opened

if TYPE_CHECKING:
    from longspan.train.needles import Tuning


def tune(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="Folder of the tuned run, RUN-needles by default.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Needles a step.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Different needles, read over and over.")] = 4096,
    shortest: Annotated[int, typer.Option(min=1, help="Tokens; the longest have the training context.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's.")] = 3e-4,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    corpus: CorpusFolder = None,
    device: Device = "auto",
) -> None:
    """Teach a model the question of S-NIAH at its training length; the tuned model is a run of its own to measure."""
    from longspan.train import checkpoint as checkpoints
    from longspan.train.needles import Tuning, lessons_of, save_tuned
    from longspan.train.needles import tune as train

    target = run.with_name(f"{run.name}-needles") if out is None else out
    if checkpoints.saved(target / "checkpoints"):
        fail(f"{target} holds a run already; choose another folder or delete it")
    of = opened(run, corpus, None, device)
    tuning = replace(Tuning(), steps=steps, batch=batch, samples=samples, shortest=shortest)
    tuning = replace(tuning, learning_rate=learning_rate, warmup=steps // 10, seed=seed)
    with console.status("making needles") as status:
        given = lessons_of(of.corpus.folder, of.config.context, tuning)
        loss = train(
            *(of.model, given, tuning, of.config.precision),
            report=lambda step, loss: status.update(f"step {step} of {steps}: loss {loss:.4f}"),
        )
    save_tuned(target, of.model, replace(of.config, name=of.config.name + _unusual(tuning)), of.step)
    console.print(f"answers' loss {loss:.4f} after {steps} steps: {target}", highlight=False, soft_wrap=True)


def _unusual(tuning: "Tuning") -> str:
    """What of a tuning is not the default, as a run's name tells it; the warm-up follows from the steps."""
    usual = asdict(type(tuning)())
    fields = {name: value for name, value in asdict(tuning).items() if name != "warmup" and value != usual[name]}
    return "".join(f"+tuning.{name}={value}" for name, value in fields.items())
