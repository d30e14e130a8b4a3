"""A process that runs one command of `longspan` after the other, so that what one has compiled serves the next.

On a GPU, importing, compiling and capturing may take longer than the run itself. Who wants commands run has a `Worker`;
its other end is `serve`, in `python -m longspan.train.worker`. They talk over a socket: a line of JSON for a command,
back comes its exit code. A command that breaks breaks its worker too, as it would a process of its own.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAM = ("-m", "longspan.train.worker")
_VARIANTS = 10_000  # that PyTorch compiles of a function before it gives up and runs it as it is; 8 unless told


class Worker:
    """Runs commands one after the other, in a process that starts with the first and is replaced when it has died."""

    def __init__(self, environment: Mapping[str, str], program: Sequence[str] = PROGRAM):
        """`program`: the arguments of Python that serve, given the descriptor of a socket."""
        self._environment, self._program = dict(environment), program
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self.busy = False

    def begin(self, arguments: Sequence[str], output: Path) -> None:
        """Run a command; everything that it prints goes to the end of `output`."""
        assert not self.busy
        message = json.dumps({"arguments": list(arguments), "output": str(output)}).encode() + b"\n"
        if not self._tell(message):
            self.end()
            self._start(output)
            self._tell(message)  # if it is dead already, its exit code tells
        self.busy = True

    def code(self) -> int | None:
        """The exit code of the command, None while it runs; of one whose worker has died, how it died."""
        assert self._process is not None
        died = self._process.poll()  # before the reply is read: what is said before dying counts
        code = self._reply()
        code = died if code is None else code
        self.busy = code is None
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process, if there is one; what it holds on a GPU is free when this returns."""
        if self._process is not None and self._line is not None:
            self._process.kill()
            self._process.wait()
            self._line.close()
        self._process = self._line = None
        self.busy = False

    def _start(self, output: Path) -> None:
        self._line, theirs = socket.socketpair()
        with theirs, output.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,  # until the first command is read: an import may fail
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for who started it, who passes it on once
            )

    def _tell(self, message: bytes) -> bool:
        """Whether there was someone to tell."""
        if self._process is None or self._line is None or self._process.poll() is not None:
            return False
        try:
            self._line.sendall(message)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _reply(self) -> int | None:
        assert self._line is not None
        try:
            line = self._line.recv(64, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return None
        return int(line) if line else None


def serve(command: Callable[[], object], line: socket.socket) -> None:
    """Run `command` with the arguments that each line says, until there are no more; an exception ends it all."""
    line.set_inheritable(False)
    restore = settings()
    with line.makefile("rb") as lines:
        for told in map(json.loads, lines):
            _print_to(told["output"])
            sys.argv = ["longspan", *told["arguments"]]
            code = exit_code(command)
            release()
            restore()
            sys.stdout.flush()
            with suppress(BrokenPipeError):  # nobody wants to know any more, and there are no more lines
                line.sendall(b"%d\n" % code)


def exit_code(command: Callable[[], object]) -> int:
    """What a process of its own would leave with, unless it is an exception that breaks it."""
    try:
        command()
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    return 0


def settings() -> Callable[[], None]:
    """What puts settings of PyTorch that a command may change back to what they are now."""
    import torch

    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()

    def restore() -> None:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.seed()  # as in a new process: at random

    return restore


def release() -> None:
    """Free what the last command has left in memory, CUDA graphs too; what it compiled stays."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # some lie in the memory of CUDA graphs, and would keep it
        torch.cuda.empty_cache()


def _print_to(path: str) -> None:
    """Let everything that is printed, by whatever code, go to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def compile_without_limit() -> None:
    """Let every variant of a function be compiled: a process of many runs needs more of them than one of one run."""
    import torch._dynamo.config as compiler

    compiler.recompile_limit = compiler.accumulated_recompile_limit = _VARIANTS


def _main() -> None:
    import torch

    from longspan.cli import main
    from longspan.results import provenance

    if commit := provenance("cpu")["commit"]:
        os.environ["LONGSPAN_COMMIT"] = commit  # of the code that is loaded, whatever becomes of the tree
    if torch.cuda.is_available():  # nothing is compiled elsewhere
        compile_without_limit()
    serve(main, socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
