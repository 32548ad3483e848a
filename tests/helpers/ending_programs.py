"""Ranks whose interpreters end in or after an eager session: a script, run by its test.

    python ending_programs.py HOW TIMES FOLDER

FOLDER is for the ranks' stores. Prints for each rank, and each time, its exit code (negative: a
signal) and the threads of ours that ran when the interpreter was about to end.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading


def threads_of_ours() -> None:
    if os.getpid() != PARENT:
        names = [t.name for t in threading.enumerate() if t.name.startswith("symmplan")]
        os.write(1, f"threads {names}\n".encode())


PARENT = os.getpid()
# Runs after what symmplan registers, because it is registered before.
atexit.register(threads_of_ours)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import symmplan  # noqa: E402
import symmplan.integrate.eager.context  # noqa: E402

WORLD = 2


def gather(x):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, WORLD, dist.group.WORLD.group_name))


def program(how: str) -> None:
    """What a rank does; the interpreter ends when it returns or raises."""
    x = torch.ones(8)
    session = symmplan.eager(memory="shm", timeout=60.0)
    if how == "never entered":
        return
    if how == "raises in it":
        with session:
            gather(x)
            raise ZeroDivisionError("the program's own")
    session.__enter__()
    gather(x)
    if how == "planned":
        session.step()
        gather(x)
    if how == "raises":
        raise ZeroDivisionError("the program's own")


def main(how: str, times: int, folder: str) -> None:
    """Fork all ranks as often; returns, or raises, in each of them and where they began."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    children = []
    for i in range(times * WORLD):
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            store = dist.FileStore(f"{folder}/store{i // WORLD}", WORLD)
            dist.init_process_group("gloo", store=store, rank=i % WORLD, world_size=WORLD)
            program(how)
            return
        children.append(child)
    for child in children:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, f"exit {code}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
