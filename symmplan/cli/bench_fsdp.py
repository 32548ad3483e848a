"""Train under FSDP2 plainly and with symmplan, and compare times, bytes and results.

The same model is trained in the same processes: with FSDP2's own collectives, and with
`symmplan.fsdp.apply`. Steps of the two alternate, so that other load hits both alike; a step's
time is its slowest rank's, and medians are compared. The time in collectives is what the host
spends in FSDP2's calls of them, waiting for peers included, which on the CPU is all of it; on CUDA
devices they are asynchronous and only whole steps are timed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from symmplan.errors import RunError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

    import torch
    from torch import nn

__all__ = ["add_arguments", "render", "run"]

#: Steps before the timed ones: the first is recorded, the second makes the plan.
_WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench fsdp``."""
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default cpu)"
    )
    parser.add_argument("--layers", type=int, default=4, help="FSDP modules (default 4)")
    parser.add_argument("--dim", type=int, default=512, help="width (default 512)")
    parser.add_argument("--tokens", type=int, default=64, help="rows of a batch (default 64)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each (default 10)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--choose",
        choices=("measure", "placed"),
        default="measure",
        help="whether to leave out of the plan what is faster in torch's own way (default measure)",
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for everything (default 300)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect their times, compare.

    Raises:
        RunError: A rank failed or did not finish in time.
    """
    if args.ranks < 2:
        raise RunError("a comparison needs peers", expected="--ranks 2 or more", got=args.ranks)
    names = ("ranks", "device", "layers", "dim", "tokens", "steps", "dtype", "choose")
    options = {name: getattr(args, name) for name in names}
    options["threads"] = max(1, (os.cpu_count() or 1) // args.ranks)
    ranks = _start(options, args.timeout)
    sides = {}
    for side in ("plain", "symmplan"):
        # A step is over when its slowest rank is.
        steps = [max(t) for t in zip(*(r[side]["step"] for r in ranks), strict=True)]
        comms = [max(t) for t in zip(*(r[side]["collectives"] for r in ranks), strict=True)]
        sides[side] = {
            "step_ms": round(statistics.median(steps) * 1e3, 3),
            "collectives_ms": round(statistics.median(comms) * 1e3, 3)
            if options["device"] == "cpu"
            else None,
        }
    plain, planned = sides["plain"], sides["symmplan"]
    return {
        # Sums of more than two ranks depend on the order of summing.
        "ok": all(r["equal"] for r in ranks) or args.ranks > 2,
        "command": "symmplan bench fsdp " + " ".join(f"--{name} {options[name]}" for name in names),
        **options,
        "results": sides,
        "step_speedup": round(plain["step_ms"] / planned["step_ms"], 2),
        "collectives_speedup": round(plain["collectives_ms"] / planned["collectives_ms"], 2)
        if planned["collectives_ms"]
        else None,
        "equal": all(r["equal"] for r in ranks),
        "stats": ranks[0]["stats"],
        "choices": ranks[0]["choices"],
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": ranks[0]["torch"],
            "device": ranks[0]["device"],
        },
    }


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    stats, machine = result["stats"], result["machine"]
    lines = [
        (
            f"{result['ranks']} ranks, {result['layers']} layers of width {result['dim']}, "
            f"{result['dtype']}; {machine['device']}, {machine['cores']} cores, "
            f"torch {machine['torch']}"
        ),
        f"{'':10} {'step ms':>10} {'collectives ms':>15}",
    ]
    for side, row in result["results"].items():
        comms = "-" if row["collectives_ms"] is None else f"{row['collectives_ms']:.2f}"
        lines.append(f"{side:10} {row['step_ms']:>10.2f} {comms:>15}")
    speedup = result["collectives_speedup"]
    lines += [
        f"{'speedup':10} {result['step_speedup']:>9.2f}x "
        + (f"{'-':>15}" if speedup is None else f"{speedup:>14.2f}x"),
        (
            f"results: {'the same bits' if result['equal'] else 'DIFFERENT'}; {stats['placed']} "
            f"collectives placed, {stats['staged']} staged, {stats['plain']} plain"
        ),
        (
            f"symmetric memory: {stats['segment_bytes']} bytes, lower bound "
            f"{stats['lower_bound_bytes']}, unshared {stats['unshared_bytes']}; "
            f"{stats['rendezvous']} rendezvous"
        ),
    ]
    return "\n".join(lines)


def _start(options: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Run the ranks; what each measured."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, store.port, options), daemon=True)
        for rank in range(options["ranks"])
    ]
    with _ended(processes):
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes):
            if any(p.exitcode for p in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.exitcode for process in processes]
        if any(code != 0 for code in codes):
            raise RunError(
                "ranks of the benchmark failed or did not finish",
                expected=f"all of them done within {timeout:g} s",
                got=f"exit codes {codes} (None: still running)",
                fix="see their output above, or raise --timeout",
                exit_codes=codes,
            )
        return [
            json.loads(bytes(store.get(f"bench/result/{rank}"))) for rank in range(options["ranks"])
        ]


@contextlib.contextmanager
def _ended(processes: list[BaseProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()


def _rank(rank: int, port: int, options: dict[str, Any]) -> None:
    """One rank's life."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    warnings.simplefilter("ignore", FutureWarning)  # newer torch renames collectives
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cuda = options["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    torch.set_num_threads(options["threads"])
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore("bench/group", store),
        rank=rank,
        world_size=options["ranks"],
        timeout=dt.timedelta(seconds=120),
    )
    store.set(f"bench/result/{rank}", json.dumps(_measure(rank, options)))
    dist.barrier()
    dist.destroy_process_group()


def _measure(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the steps of both sides, and whether they computed the same."""
    import attrs
    import torch
    import torch.distributed as dist

    import symmplan

    sides = {side: _Side(rank, options) for side in ("plain", "symmplan")}
    handle = symmplan.fsdp.apply(sides["symmplan"].model, choose=options["choose"], timeout=60.0)
    for side in sides.values():
        side.watch()
    for step in range(_WARM_UP + options["steps"]):
        for side in sides.values():
            dist.barrier()
            side.step(step)
        if rank == 0 and step >= _WARM_UP:
            print(f"bench fsdp: {step - _WARM_UP + 1}/{options['steps']}", file=sys.stderr)
    parameters = zip(*(side.model.parameters() for side in sides.values()), strict=True)
    result: dict[str, Any] = {
        "equal": all(torch.equal(_local(a), _local(b)) for a, b in parameters),
        "stats": attrs.asdict(handle.stats),
        "choices": [attrs.asdict(choice) for choice in handle.choices],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options["device"] == "cuda" else "CPU",
    }
    for name, side in sides.items():
        result[name] = {
            "step": side.steps[_WARM_UP:],
            "collectives": side.collectives[_WARM_UP:],
        }
    handle.remove()
    return result


def _local(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.detach().to_local()
    return result


class _Side:
    """One of the two models, and what was measured of it."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        self.device = torch.device(options["device"])
        self.rank = rank
        self.shape = (options["tokens"], options["dim"])
        self.steps: list[float] = []
        self.collectives: list[float] = []
        self._waited = 0.0
        self.model: nn.Module = _model(options["layers"], options["dim"]).to(self.device)
        mesh = init_device_mesh(options["device"], (options["ranks"],))
        policy = MixedPrecisionPolicy()
        if options["dtype"] == "bfloat16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in self.model.children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def watch(self) -> None:
        """Time FSDP2's collectives from now on."""
        from torch.distributed.fsdp import FSDPModule

        from symmplan import _compat

        for module in self.model.modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in _compat.fsdp_param_groups(module):
                gather, scatter = _compat.fsdp_comms(group)
                module.set_custom_all_gather(_Watched(gather, self))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_Watched(scatter, self))  # type: ignore[arg-type]

    def waited(self, seconds: float) -> None:
        """A collective took so long."""
        self._waited += seconds

    def step(self, number: int) -> None:
        """Train once."""
        import torch

        generator = torch.Generator().manual_seed(97 * number + self.rank)
        batch = torch.randn(self.shape, generator=generator).to(self.device)
        self._waited = 0.0
        begin = time.perf_counter()
        self.model(batch).float().pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - begin)
        self.collectives.append(self._waited)


class _Watched:
    """An FSDP2 collective whose calls are timed."""

    def __init__(self, comm: Any, side: _Side) -> None:
        self._comm = comm
        self._side = side

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        """As the collective does."""
        begin = time.perf_counter()
        result = self._comm.allocate(*args, **kwargs)
        self._side.waited(time.perf_counter() - begin)
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the collective does."""
        begin = time.perf_counter()
        result = self._comm(*args, **kwargs)
        self._side.waited(time.perf_counter() - begin)
        return result


def _model(layers: int, dim: int) -> nn.Module:
    from torch import nn

    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.Tanh(), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )
    )
