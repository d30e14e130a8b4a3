"""Commands that leave in every way there is, for the tests of workers; any other word is a command of `longspan`."""

import os
import signal
import socket
import subprocess
import sys
import time

import torch

from longspan.train.worker import serve


def command() -> None:
    match sys.argv[1]:
        case "pid":
            print("pid", os.getpid(), flush=False)
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "words":
            sys.exit("some last words")
        case "raise":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        case "kill":
            print("about to be killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("deaf", flush=True)
            time.sleep(60)
        case "print":
            print("by Python")
            os.write(2, b"by a library\n")
            subprocess.run(["echo", "by a child"], check=True)
            print("read:", sys.stdin.read())
        case "change":
            torch.set_float32_matmul_precision("high")
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(7)
        case "look":
            precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
            print(precision, dtype, torch.initial_seed() == 7)
        case _:
            from longspan.cli import main

            main()


if __name__ == "__main__":
    serve(command, socket.socket(fileno=int(sys.argv[1])))
