"""TensorBoard beside the log."""

from pathlib import Path

from longspan.cli.console import fail
from longspan.results import Row


class Events:
    """TensorBoard events of the log's rows, if wanted."""

    def __init__(self, folder: Path, wanted: bool):
        self.writer = None
        if wanted:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                fail("--tensorboard needs tensorboard: pip install tensorboard")
            self.writer = SummaryWriter(str(folder / "events"))

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def __call__(self, row: Row) -> None:
        if self.writer is not None:
            numbers = row.get("scores", row) if row["event"] == "validate" else row
            for key, value in numbers.items():
                if isinstance(value, float):
                    self.writer.add_scalar(f"{row['event']}/{key}", value, row["step"])
