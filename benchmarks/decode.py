"""Decode with a tensor-parallel Llama: microseconds of a step for each number of sequences.

Each layer sums twice over the ranks. The program is compiled once for each number of sequences, the
largest first, and on CUDA captured in a CUDA graph for each of them. The sides are the same weights
compiled in several ways:

- plain: Inductor, whose sums are the process group's
- one-shot: Inductor with its own lowering to torch's one-shot kernel, for up to --one-shot-bytes
- symmplan: symmplan's backend, with each --memory

Sides alternate, and each round is several steps of one number of sequences. The time of a round is
that of its slowest rank. The results are medians, and must be those of plain, up to the order of
sums. No rendezvous may come after the first number of sequences, and segments may not grow.
"""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option
from symmplan.bench.parts.numbers import count_of
from symmplan.report.format import count, size
from symmplan.torch_private.benches import ONE_SHOT, enable_symmetric_memory, inductor_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import torch

__all__ = ["add_arguments", "render", "run"]

_SIDES = ("plain", "one-shot", "symmplan")
_SEVERAL = {"nargs": "+", "metavar": "NAME"}
_SIZES = (512, 448, 384, 320, 256, 192, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1)
_OPTIONS = (
    Option("sequences", "decoded at a time", (8, 1), _SIZES, {"nargs": "+", "type": count_of}),
    Option("layers", "", 2, 4),
    Option("dim", "width of the layers", 64, 4096),
    Option("length", "entries of the caches", 16, 1024),
    Option("memory", "memory backends", ("auto",), ("auto", "cuda"), _SEVERAL),
    Option("sides", "", ("plain", "symmplan"), _SIDES, {**_SEVERAL, "choices": _SIDES}),
    Option("one_shot_bytes", "the most bytes of a sum in one shot", 1 << 20),
    Option("rounds", "timed rounds", 5, 20),
    Option("steps", "steps in a round", 2, 20),
    Option("inner", "", "eager", "inductor", {"choices": ("inductor", "eager")}),
    Option("dtype", "", "float32", "bfloat16", {"choices": ("float32", "bfloat16")}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/decode.py``."""
    command.add_options(parser, _OPTIONS, timeout=900.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, time all sides, compare.

    Raises:
        CommandError: A rank failed or did not finish in time, or there are no peers.
    """
    command.check_peers(args.ranks)
    settings = command.settings_of(args, _OPTIONS)
    settings["sequences"] = sorted(settings["sequences"], reverse=True)
    about, ranks = command.measured(_measure, settings, args)
    result = command.compared(about, ranks, _row)
    result["plans"] = ranks[0]["plans"]
    still = all(plan["still"] for rank in ranks for plan in rank["plans"].values())
    return {**result, "ok": result["ok"] and still}


def _row(rounds: dict[str, list[float]]) -> dict[str, Any]:
    """One number of sequences, over all ranks."""
    ms = timing.median_ms(rounds)
    others = [side for side in ms if not side.startswith("symmplan")]
    ours = [side for side in ms if side not in others]
    if not (others and ours):
        return {"gain": None}
    first, second = (min(sides, key=ms.__getitem__) for sides in (others, ours))
    # Rounds are compared in pairs: other load hits both sides alike.
    ratios = (a / b for a, b in zip(rounds[first], rounds[second], strict=True))
    return {"gain": round(statistics.median(ratios), 3)}


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    steps, sides = result["steps"], [*result["results"][0]["ms"]]
    what = f"{count(result['layers'], 'layer')} of width {result['dim']}"
    lines = [command.heading(result, f"{what}, us of a step")]
    cells = [
        [row["sequences"], *(row["ms"][s] / steps * 1e3 for s in sides), row["gain"]]
        for row in result["results"]
    ]
    lines += command.cells(["sequences", *(s.replace(" ", "_") for s in sides), "gain"], cells)
    for side, plan in result["plans"].items():
        grown = "" if plan["still"] else "; IT GREW, OR MET AGAIN"
        lines.append(f"{side}: {size(plan['bytes'])} for all of them{grown}")
        lines += command.choice_lines(plan["choices"])
    same = all(row["equal"] for row in result["results"])
    return "\n".join([*lines, f"results {'agree' if same else 'DIFFER'}"])


# On each rank -------------------------------------------------------------------------------------


def _measure(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs."""
    import torch
    from decoder import Decoder, Shape
    from torch.distributed.device_mesh import init_device_mesh

    device, dim = timing.device_of(settings, rank), settings["dim"]
    mesh = init_device_mesh(settings["device"], (settings["ranks"],))
    if "one-shot" in settings["sides"]:
        enable_symmetric_memory(mesh.get_group().group_name)
    shape = Shape(
        dim=dim,
        heads=max(8, dim // 128),
        hidden=dim * 7 // 2,
        layers=settings["layers"],
        length=settings["length"],
    )
    how = {"device": device, "dtype": getattr(torch, settings["dtype"])}
    model = Decoder(shape, settings["sequences"][0], mesh, **how)
    names = [side for side in settings["sides"] if side != "symmplan"]
    if "symmplan" in settings["sides"]:
        names += [f"symmplan {memory}" for memory in settings["memory"]]
    torch.compiler.config.recompile_limit = len(names) * len(settings["sequences"]) + 1
    with torch.inference_mode():
        sides = {name: _Side(name, model, settings) for name in timing.marked(names, str)}
        rows = [
            _compare(sequences, sides, settings, device)
            for sequences in timing.marked(settings["sequences"], lambda n: count(n, "sequence"))
        ]
    plans = {name: side.plan() for name, side in sides.items() if side.backend is not None}
    return {"rows": rows, "plans": plans}


def _compare(
    sequences: int, sides: dict[str, _Side], settings: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Seconds of each round on each side, and whether all sides gave the same."""
    acts = {name: side.steps[sequences] for name, side in sides.items()}
    results: dict[str, torch.Tensor] = {}

    def judge(found: dict[str, torch.Tensor]) -> None:
        results.update({name: result.float() for name, result in found.items()})

    seconds = timing.alternate(acts, settings["rounds"], device, warm_up=1, judge=judge)
    want = next(iter(results.values()))
    most = float(want.abs().max()) * (0.05 if settings["dtype"] == "bfloat16" else 1e-4)
    apart = max(float((result - want).abs().max()) for result in results.values())
    return {"sequences": sequences, "seconds": seconds, "equal": apart <= most}


class _Side:
    """The decoder, compiled in one way for each number of sequences.

    Attributes:
        backend: symmplan's; None if the side has none.
        steps: ``{sequences: runs several steps, and returns the last one's result}``.
    """

    def __init__(self, name: str, model: Any, settings: dict[str, Any]) -> None:
        import torch

        import symmplan

        self.backend: Any = None
        if name.startswith("symmplan"):
            memory: Any = name.partition(" ")[2]
            self.backend = symmplan.backend(settings["inner"], memory=memory, timeout=120.0)
        compiled = torch.compile(
            model, backend=self.backend or settings["inner"], fullgraph=True, dynamic=False
        )
        chosen: dict[str, Any] = {}
        if name == "one-shot":
            chosen = dict(zip(ONE_SHOT, (True, settings["one_shot_bytes"]), strict=True))
        self.steps: dict[int, Callable[[int], torch.Tensor]] = {}
        self._met: list[tuple[int, int]] = []
        pool = None
        with inductor_settings().patch(chosen):
            for sequences in settings["sequences"]:
                x = _tokens(sequences, model)
                run = _warmed(compiled, x, torch.zeros(1, dtype=torch.int64, device=x.device))
                if x.is_cuda:
                    pool = torch.cuda.graph_pool_handle() if pool is None else pool
                    run = _captured(run, pool)
                self.steps[sequences] = _repeated(run, settings["steps"])
                self._met.append(self._held())

    def _held(self) -> tuple[int, int]:
        """How many rendezvous there were, and bytes of segments."""
        if self.backend is None:
            return 0, 0
        stats = self.backend.stats
        return stats.rendezvous, stats.segment_bytes

    def plan(self) -> dict[str, Any]:
        """What it took, how its sums run, and whether that was all with the first of them."""
        from attrs import asdict

        first, *later = self._met
        still = {*later, self._held()} == {first}
        choices = [asdict(choice) for choice in self.backend.choices]
        return {"bytes": first[1], "still": still, "choices": choices}


def _tokens(sequences: int, model: Any) -> torch.Tensor:
    import torch

    weight = model.layers[0].norm.weight
    generator = torch.Generator().manual_seed(sequences)
    return torch.randn(sequences, weight.shape[0], generator=generator).to(weight)


def _warmed(compiled: Any, x: torch.Tensor, place: torch.Tensor) -> Callable[[], torch.Tensor]:
    for _ in range(2):
        compiled(x, place)
    return lambda: compiled(x, place)


def _captured(run: Callable[[], torch.Tensor], pool: Any) -> Callable[[], torch.Tensor]:
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()

    def replay(_inputs: Any = run) -> torch.Tensor:  # the graph has their addresses
        graph.replay()
        return result

    return replay


def _repeated(run: Callable[[], torch.Tensor], steps: int) -> Callable[[int], torch.Tensor]:
    def several(_turn: int) -> torch.Tensor:
        for _ in range(steps - 1):
            run()
        return run()

    return several


if __name__ == "__main__":
    from symmplan.cli.shell import perform

    sys.exit(perform("python benchmarks/decode.py", sys.modules[__name__], sys.argv[1:]))
