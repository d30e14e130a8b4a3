"""Matrices whose rows are spread over processes, brought together: each process gets some of them whole.

FSDP leaves every process some rows of every matrix; Muon needs whole matrices. Of k matrices of one shape, process r
owns numbers r m to (r + 1) m - 1 with m = k / size rounded up, and what it needs comes by one all-to-all:

    process 0 has   a0 b0 c0 d0        process 0 gets   a0 b0
    process 1 has   a1 b1 c1 d1                         a1 b1   whole, and process 1 gets c and d

so that the orthogonalisation is shared out too, and so is the momentum.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def owned_by_each(count: int, size: int) -> int:
    """How many of `count` matrices a process owns; the last processes' may be made up of zeros."""
    return -(-count // size)


def rows_of_each(rows: int, size: int) -> int:
    """How many rows of a matrix a process has, as FSDP cuts them; the last processes may have fewer or none."""
    return -(-rows // size)


def to_owners(parts: list[Tensor], rows: int, size: int) -> Tensor:
    """This process's rows of every matrix to its own matrices, whole: (owned, rows, columns)."""
    owned, each, columns = owned_by_each(len(parts), size), rows_of_each(rows, size), parts[0].shape[1]
    sent = parts[0].new_zeros(size * owned, each, columns)
    for place, part in zip(sent, parts, strict=False):
        place[: len(part)] = part
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    # (sender, matrix, its rows, columns) to (matrix, sender's rows one after another, columns)
    whole = received.view(size, owned, each, columns).transpose(0, 1).reshape(owned, size * each, columns)
    return whole[:, :rows]


def from_owners(whole: Tensor, like: list[Tensor], size: int) -> list[Tensor]:
    """The way back: from its own matrices to this process's rows of every matrix."""
    owned, rows, columns = whole.shape
    each = rows_of_each(rows, size)
    padded = whole.new_zeros(owned, size * each, columns)
    padded[:, :rows] = whole
    sent = padded.view(owned, size, each, columns).transpose(0, 1).contiguous()  # (receiver, matrix, its rows, columns)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    rows_of_all = received.flatten(0, 1)  # (size * owned, each, columns), in the order of the matrices
    return [part[: len(mine)] for part, mine in zip(rows_of_all, like, strict=False)]


def gathered(owned: Tensor, count: int, size: int) -> Tensor:
    """All matrices from the processes that own them, on every process."""
    parts = [torch.empty_like(owned) for _ in range(size)]
    dist.all_gather(parts, owned)
    return torch.cat(parts)[:count]


def owned_of(whole: Tensor, rank: int, size: int) -> Tensor:
    """Those of all matrices that a process owns, with zeros for those that do not exist."""
    each = owned_by_each(len(whole), size)
    mine = whole[rank * each : (rank + 1) * each]
    return torch.cat([mine, mine.new_zeros(each - len(mine), *whole.shape[1:])])
