"""How the unsharded parameters of an FSDP2 group lie in one placement, if they can."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.capture.fsdp_recording import Key
from symmplan.coordination.world import on_device
from symmplan.errors import RunError
from symmplan.memory.backends.torch_symm import SPLIT_WORDS, is_whole_words
from symmplan.torch_private import fsdp2, fsdp2_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["NO_SEAM", "Asked", "Gathered", "Layout", "layout_of", "shards_of"]

#: Why a group has no layout where torch has other methods.
NO_SEAM = "this torch's FSDP2 lacks what is replaced"

#: Alignment in bytes of a parameter in its placement, which is what kernels expect of torch's.
_ALIGN = 512


@frozen(eq=False)
class Gathered:
    """What FSDP2 keeps of a gather that was started and not yet waited for.

    Its attributes are those of FSDP2's own ``AllGatherResult`` that it reads elsewhere.
    """

    all_gather_event: Any = None
    all_gather_work: Any = None


@frozen(eq=False)
class Asked(Gathered):
    """What FSDP2 keeps of a gather that has to wait for room.

    FSDP2 forgets it where it forgets a gather that was started and not waited for.

    Attributes:
        key: Which collective.
        streams: On which streams it is to run.
        shards: The shards as they were when FSDP2 asked.
        copied: What has happened when these are there; None on the CPU.
        crowding: Names of the modules that had its bytes then.
        outside: Whether the program asked outside of its training passes.
    """

    key: Key = field(kw_only=True)
    streams: tuple[Any, Any] = field(kw_only=True)
    shards: Sequence[torch.Tensor] = field(kw_only=True)
    copied: Any = field(kw_only=True)
    crowding: Sequence[str] = field(kw_only=True)
    outside: bool = field(kw_only=True)


@frozen
class Layout:
    """The parameters of one group, one behind the other.

    A parameter is one part, or as many as its own tensor makes of it (``fsdp_pre_all_gather``). A
    parameter whose first dimension the ranks do not divide has shards of equal size all the same:
    FSDP2 pads the last ones. Gathered one behind the other, the padding comes to lie behind the
    parameter, which is all that a padded placement needs.

    Attributes:
        parts: How many parts each parameter has.
        dtypes: Of each part.
        counts: Elements of this rank's shard of each part, padded, equal on all ranks.
        offsets: Where each part begins in the placement, in bytes.
        nbytes: Size of the placement.
        ranks: Ranks that hold a shard.
        own: Whether any parameter says by itself how it is gathered.
    """

    parts: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int
    ranks: int
    own: bool

    @property
    def one_dtype(self) -> bool:
        """Whether all parts have the same; else they are gathered as bytes."""
        return len(set(self.dtypes)) == 1

    @property
    def part_bytes(self) -> list[int]:
        """Bytes of this rank's shard of each part."""
        return [n * d.itemsize for n, d in zip(self.counts, self.dtypes, strict=True)]

    def key(self, site: str, *, backward: bool) -> Key:
        """The gather of this group, as its flat form is recorded."""
        one = self.one_dtype
        count = sum(self.counts if one else self.part_bytes) * self.ranks
        dtype = str(self.dtypes[0]).removeprefix("torch.") if one else "uint8"
        return Key(site, "all_gather", count, dtype, backward)


def shards_of(group: Any, layout: Layout, site: str) -> list[torch.Tensor]:
    """What is gathered of each part, as it is now; on the current stream.

    Args:
        group: FSDP2's.
        layout: Of it.
        site: Name of the module in the model.

    Raises:
        RunError: A shard, or what a parameter makes of it, has not the sizes and types of before.
    """
    if not layout.own:
        shards = fsdp2_in_place.flat_shards(group)
        for parameter, shard, dtype in zip(group.fsdp_params, shards, layout.dtypes, strict=True):
            if shard.dtype != dtype and parameter.param_dtype is None:
                raise RunError(
                    f"a parameter of FSDP module {site!r} has another type than when FSDP2 began",
                    expected=dtype,
                    got=shard.dtype,
                    fix="cast the model before its first forward pass, or have what is gathered "
                    f"cast: fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype={shard.dtype}))",
                    module=site,
                )
        return shards
    found: list[torch.Tensor] = []
    for number, parameter in enumerate(group.fsdp_params):
        begin, end = len(found), len(found) + layout.parts[number]
        made = fsdp2_in_place.inputs_of(parameter)
        found += made
        if not fsdp2_in_place.has_own_gather(parameter):
            continue
        expected = [*zip(layout.dtypes[begin:end], layout.counts[begin:end], strict=True)]
        got = [(tensor.dtype, tensor.numel()) for tensor in made]
        if got != expected:
            raise RunError(
                f"fsdp_pre_all_gather of a parameter of FSDP module {site!r} returns other tensors "
                "than before",
                expected=", ".join(f"{count} of {dtype}" for dtype, count in expected),
                got=", ".join(f"{count} of {dtype}" for dtype, count in got),
                fix="return tensors of the same sizes and types in each gather, as FSDP2 asks",
                module=site,
            )
    return found


def layout_of(group: Any, methods: fsdp2_in_place.Methods) -> Layout | str | None:
    """The layout of a parameter group; or why it has none.

    None where a parameter has a gather of its own: until FSDP2 has gathered it once.

    Args:
        group: FSDP2's, after its lazy initialization.
        methods: What replaces its methods.
    """
    if reason := methods.why_own():
        return reason
    if not fsdp2_in_place.has_torchs_methods(group):
        return fsdp2_in_place.OTHERS
    parameters = list(group.fsdp_params)
    if not fsdp2.shards(group):  # others have no gathers, and raise if asked for a group
        return "its parameters are not sharded"
    if not parameters or not fsdp2_in_place.has_seam():
        return NO_SEAM
    if fsdp2_in_place.reshards_elsewhere(group):
        return "it reshards to another mesh after forward"
    ranks = fsdp2_in_place.group_of(group).size()
    if ranks < 2:
        return "its group has one rank"
    for p in parameters:
        reason = _reason(p, ranks)
        if reason:
            return reason
    if not all(map(_was_gathered, parameters)):
        return None
    each = [_parts(p, ranks) for p in parameters]
    dtypes, counts = zip(*(part for parts in each for part in parts), strict=True)
    shards = [count * dtype.itemsize for dtype, count in zip(dtypes, counts, strict=True)]
    if on_device(group.device) and not all(map(is_whole_words, shards)):
        return SPLIT_WORDS
    offsets = []
    end = 0
    for nbytes in shards:
        offsets.append(end)
        end += -(-nbytes * ranks // _ALIGN) * _ALIGN
    own = any(map(fsdp2_in_place.has_own_gather, parameters))
    return Layout(tuple(map(len, each)), dtypes, counts, tuple(offsets), end, ranks, own)


def _parts(parameter: Any, ranks: int) -> list[tuple[torch.dtype, int]]:
    """Type and elements of what a rank gives to a parameter's gather."""
    if fsdp2_in_place.has_own_gather(parameter):
        outputs = fsdp2_in_place.outputs_of(parameter)
        return [(output.dtype, output.numel() // ranks) for output in outputs]
    dtype = parameter.param_dtype or parameter.orig_dtype
    return [(dtype, fsdp2_in_place.shard_of(parameter).numel())]


def _was_gathered(parameter: Any) -> bool:
    """Whether FSDP2 has gathered a parameter whose own tensor says what is gathered."""
    return not fsdp2_in_place.has_own_gather(parameter) or (
        bool(fsdp2_in_place.outputs_of(parameter))
        and fsdp2_in_place.unsharded(parameter) is not None
    )


def _reason(parameter: Any, ranks: int) -> str:
    if parameter.offload_to_cpu:
        return "its shards lie on the CPU"
    if parameter.fsdp_placement.dim != 0:
        return "a parameter is not sharded along its first dimension"
    if fsdp2_in_place.has_own_gather(parameter):
        if not _was_gathered(parameter):
            return ""
        if not fsdp2_in_place.shows_its_tensors(parameter):
            return "a parameter's tensor does not show what it consists of (__tensor_flatten__)"
        empty = not all(count for _, count in _parts(parameter, ranks))
    else:
        elements = fsdp2_in_place.shard_of(parameter).numel() * ranks
        empty = elements < max(1, math.prod(fsdp2_in_place.size_of(parameter)))
    return "a parameter has no elements" if empty else ""
