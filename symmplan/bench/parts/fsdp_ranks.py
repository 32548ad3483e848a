"""What a rank of ``symmplan bench fsdp`` does: build the sides, step them in turn, compare."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts.fsdp_tables import counted_in
from symmplan.bench.parts.timing import device_of, in_turns, least_free, tell
from symmplan.launcher.ranks import mark
from symmplan.report.format import size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from symmplan.bench.parts.fsdp_sides import Side

__all__ = ["difference", "measure", "worst"]

#: Steps of a new side: the first is recorded, the second makes the plan.
_WARM_UP = 4
#: Rounds before the timed ones, for each number of tokens.
_SETTLE = 2
#: The sides that are compared, whatever else there is.
_NEEDED = ("plain", "symmplan")
_BYTES = ("peak_allocated", "peak_reserved", "device")


def measure(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train all sides; what was seen of each, as plain data.

    Args:
        rank: This one.
        options: Of the benchmark.

    Collective: yes.
    """
    import attrs

    sides: dict[str, Side] = {}
    memory: dict[str, dict[str, int]] = {}
    ballast = _ballast(options.get("left"))
    wanted, left_out = options["sides"], {}
    for i, name in enumerate(wanted):
        if memory and name not in _NEEDED:
            device = device_of(options, rank)
            why = _no_room(device, memory, last="symmplan" not in wanted[i:])
            if why is not None:
                left_out[name] = why
                continue
        mark(f"building {name}")
        sides[name], memory[name] = _built(name, rank, options)
    result: dict[str, Any] = {
        "memory": memory,
        "left_out": left_out,
        "runs": [_run(sides, tokens, options) for tokens in options["tokens"]],
        "how": {name: side.how for name, side in sides.items() if side.how},
    }
    handle = sides["symmplan"].handle if "symmplan" in sides else None
    if handle is not None:
        result["stats"] = attrs.asdict(handle.stats)
        result["choices"] = [attrs.asdict(choice) for choice in handle.choices]
    for side in sides.values():
        if side.handle is not None:
            side.handle.remove()
    result["retries"] = _retries()
    del ballast
    return result


def _no_room(
    device: torch.device, memory: Mapping[str, Mapping[str, int]], *, last: bool
) -> str | None:
    """Why another side would leave no room for those that are needed; None if it would.

    A side takes as much again as the largest so far, and a quarter more, because kept parameters
    are more bytes. What it keeps between its steps, symmplan's side cannot have.

    Args:
        device: This rank's.
        memory: The bytes of the sides that were built.
        last: Whether symmplan's side is there already, or not asked for.

    Collective: yes.
    """
    most = max(of.get("peak_device", 0) for of in memory.values())
    kept = max(of.get("between_steps", 0) for of in memory.values())
    left = least_free(device, most + most // 4 + (0 if last else kept))
    if left is None or left >= 0:
        return None
    return f"beside the other sides {size(-left)} of the device are missing for it"


def _ballast(left: float | None) -> torch.Tensor | None:
    """What leaves so many GiB of the device free; None if all of it is."""
    if left is None:
        return None
    import torch

    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, free - int(left * (1 << 30))), dtype=torch.uint8, device="cuda")


def _retries() -> int:
    """How often torch's allocator has emptied its cache to go on; 0 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _built(name: str, rank: int, options: Mapping[str, Any]) -> tuple[Side, dict[str, Any]]:
    """A side after its first steps, and the bytes that it took beside the earlier sides' models."""
    import torch

    from symmplan.bench.parts.fsdp_program import ProgramSide
    from symmplan.bench.parts.fsdp_sides import Side

    look = options["device"] == "cuda"
    if look:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    before = _device_bytes() if look else {}
    driver = _Driver(look=look)
    side = (ProgramSide if options.get("program") else Side)(name, rank, options)
    _train(side, range(_WARM_UP), options)
    most = driver.over()
    if look:
        torch.cuda.reset_peak_memory_stats()
    _train(side, range(_WARM_UP, _WARM_UP + 2), options)
    found = {"symmetric": side.symmetric_bytes}
    if look:
        after = _device_bytes()
        found |= {key: after[key] - before[key.removeprefix("peak_")] for key in _BYTES}
        found["peak_device"] = max(most, after["device"]) - before["device"]
        found["between_steps"] = after["allocated"] - before["allocated"]
        if side.handle is not None:
            stats = side.handle.stats
            found |= dict(stats.beyond_segments) | {"without_owner": stats.bytes_without_owner}
    return side, found


class _Driver(threading.Thread):
    """Asks the driver all the time how many bytes of the device are in use, until it is over.

    Args:
        look: Whether there is a device.
    """

    def __init__(self, *, look: bool) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self._most = 0
        if look:
            import torch

            self._device = torch.cuda.current_device()  # each thread has a current one
            self.start()

    def run(self) -> None:
        """Ask every 2 ms."""
        import torch

        torch.cuda.set_device(self._device)
        while not self._over.wait(0.002):
            self._most = max(self._most, _device_bytes()["device"])

    def over(self) -> int:
        """The most bytes that were in use."""
        self._over.set()
        if self.ident is not None:
            self.join()
        return self._most


def _train(side: Side, steps: range, options: Mapping[str, Any]) -> None:
    for step in steps:
        side.step(step, max(options["tokens"]))
        side.advance()


def _device_bytes() -> dict[str, int]:
    """Bytes of the device: torch's, and by the driver's number, with whatever else there is."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "device": total - free,
    }


def _run(sides: Mapping[str, Side], tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Step all sides in turn, and compare what they computed."""
    if options["cuda_graph"]:
        for side in sides.values():
            side.capture(tokens)
    plain, what = sides.get("plain"), counted_in(options["model"])
    if plain is not None:
        _rejoin(sides, plain)
    largest = {name: 0.0 for name in sides if name not in ("plain", "unsharded")}
    # Numbers that no step had before, and the same on all sides.
    begin = 1000 * (1 + options["tokens"].index(tokens))
    for turn, order in enumerate(in_turns(list(sides), _SETTLE + options["steps"])):
        for name in order:
            if turn == _SETTLE:
                sides[name].restart()
            sides[name].step(begin + turn, tokens)
        if plain is not None:
            for name, before in largest.items():
                apart = difference(plain.gradients(), sides[name].gradients())
                largest[name] = worst([before, apart])
        for side in sides.values():
            side.advance()
        if plain is not None:
            _rejoin(sides, plain)
        if turn >= _SETTLE:
            step, steps = turn - _SETTLE + 1, options["steps"]
            part = (options["tokens"].index(tokens) + step / steps) / len(options["tokens"])
            mark(f"{tokens} {what}, {step}/{steps}", part)
    tell({name: side.times["step"] for name, side in sides.items()})
    found: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        found[name] = {"times": side.times, "losses": side.losses, "collectives": side.collectives}
        if name in largest and plain is not None:
            found[name]["difference"] = largest[name]
            found[name]["losses_equal"] = side.losses == plain.losses
    if options["device"] == "cuda" and options.get("profile", True):
        for name, side in sides.items():
            mark(f"{tokens} {what}, profile of {name}")
            found[name]["profile"] = side.profile(tokens)
    return {"tokens": tokens, "sides": found}


def _rejoin(sides: Mapping[str, Side], plain: Side) -> None:
    """An optimizer makes more of a difference in the last place: all go on from one place."""
    for name, side in sides.items():
        if name not in ("plain", "unsharded"):
            side.follow(plain)


def difference(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """How far tensors are from others: the norm of the difference, as a part of their norm.

    0.0 only if all are equal.
    """
    import torch

    pairs = list(zip(expected, got, strict=True))
    if not pairs:
        return 0.0
    apart = torch.stack([(a.float() - b.float()).square().sum() for a, b in pairs]).sum()
    total = torch.stack([a.float().square().sum() for a, _ in pairs]).sum()
    return float((apart / total).sqrt()) if float(apart) != 0.0 else 0.0


def worst(differences: Sequence[float]) -> float:
    """The largest; not a number if one is not, which `max` may overlook."""
    return math.nan if any(math.isnan(d) for d in differences) else max(differences)
