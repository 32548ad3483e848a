"""Ranks whose interpreters end in or after an eager session: run as a script, by test_endings.py.

    python ending_programs.py HOW TIMES

Prints one line per rank and time: its exit code, negative for a signal.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist

import symmplan

WORLD = 2


def gather(x):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, WORLD, dist.group.WORLD.group_name))


def program(how: str) -> None:
    """What a rank does; the interpreter ends when it returns or raises."""
    x = torch.ones(8)
    session = symmplan.eager(memory="shm", timeout=20.0)
    if how == "never entered":
        return
    session.__enter__()
    for _ in range(2):
        gather(x)
        if how != "recording":
            session.step()
    dist.barrier()
    if how == "left":
        session.__exit__(None, None, None)
    elif how == "raises":
        raise ZeroDivisionError("the program's own")
    elif how == "raises inside":
        error = ZeroDivisionError("the program's own")
        session.__exit__(ZeroDivisionError, error, None)
        raise error


def main(how: str, times: int) -> bool:
    """Fork all ranks, several times. Returns in each of them; True in the one that started them."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            path, children = f"{folder}/store", []
            for rank in range(WORLD):
                sys.stdout.flush()
                child = os.fork()
                if not child:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                    dist.init_process_group(
                        "gloo", store=dist.FileStore(path, WORLD), rank=rank, world_size=WORLD
                    )
                    program(how)
                    return False
                children.append(child)
            for child in children:
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return True


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
