"""CPU ranks of one host: each rank's bytes are a shared file that all peers map.

A rank's file holds the segment, then (from the next page) the control area. Only processes of the
same user on the same host can open it, and they check what they opened: see
`symmplan.memory.backends.shm_file`.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, define, evolve, field, frozen

from symmplan.coordination.groups import ProcessIdentity, is_gone, this_process
from symmplan.errors import BackendError
from symmplan.memory.backends.shm_file import (
    SharedFile,
    closing_fd,
    create,
    map_file,
    open_peer,
    publish,
    remove,
    unguessable_name,
)
from symmplan.memory.meeting.control import ControlArea, Meeting, layout
from symmplan.memory.meeting.counterparts import HostsMeeting, connections_of, counterparts_of
from symmplan.memory.race_log import RaceLog, log_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group
    from symmplan.memory.health import Health
    from symmplan.memory.meeting.counterparts import Counterparts
    from symmplan.memory.races import RaceDetector, WatchedSegment
    from symmplan.memory.segment import Allocation, Segment
    from symmplan.model import SegmentSpec

__all__ = ["ShmBackend"]


@define(eq=False)
class _Own:
    """This rank's side of a segment."""

    fd: int | None  # open until the arena is settled: peers come in through it
    file: SharedFile
    memory: mmap.mmap | None
    control: ControlArea
    data: int  # bytes of the file before its control area
    starts: dict[str, int]  # of each group's part of that
    log: int = 0  # first byte of the log of accesses; 0 if races are not looked for
    watched: WatchedSegment | None = None
    mapped: dict[tuple[int, int], mmap.mmap] = field(factory=dict)  # peers' files, by inode

    def settle(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.mapped.clear()
        self.memory = None

    def release(self) -> None:
        self.control.mark_released()
        self.control.close()
        self.settle()


@frozen
class _Offer:
    """A rank's note to its peers about a segment."""

    file: SharedFile
    process: ProcessIdentity
    nbytes: int = field(converter=int)
    data: int = field(converter=int)
    start: int = field(converter=int)
    log: int = field(converter=int)
    world_rank: int = field(converter=int)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes, group: Group, rank: int) -> _Offer:
        try:
            data: dict[str, Any] = json.loads(text)
            file = SharedFile(**data.pop("file"))
            return _Offer(file, ProcessIdentity(**data.pop("process")), **data)
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            raise _not_ours(group, f"rank {rank}") from error


class ShmBackend:
    """POSIX shared memory."""

    name = "shm"
    frees = frees_together = True

    def __init__(self) -> None:
        self._own: dict[str, _Own] = {}
        #: Looks for races on the segments that are allocated from then on, if it is set.
        self.races: RaceDetector | None = None

    def allocate(
        self,
        spec: SegmentSpec,
        device: torch.device,  # noqa: ARG002
        groups: Sequence[Group],
        health: Health,
    ) -> Allocation:
        """A nameless shared file of this rank, mapped."""
        starts, nbytes = layout([group.size for group in groups])
        page = mmap.PAGESIZE
        start = -(-spec.nbytes // page) * page
        log = start + nbytes
        races = self.races
        fd, file = create(log + (log_nbytes(races.size) if races is not None else 0))
        try:
            memory = map_file(fd, file.nbytes)
            tensor = torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes)
            control = ControlArea(memory, start, log - start)
            watched = None if races is None else races.watch(spec.name, memory, log, health)
        except BaseException:
            os.close(fd)
            raise
        own = self._own[spec.name] = _Own(
            fd,
            file,
            memory,
            control,
            data=start,
            starts=dict(zip((group.name for group in groups), starts, strict=True)),
            log=0 if watched is None else log,
            watched=watched,
        )
        health.on_break.append(control.mark_broken)
        return tensor, own.release

    def rendezvous(self, segment: Segment, group: Group, exchange: Exchange) -> None:
        """Map every peer's file.

        Raises:
            BackendError: A peer is on another host, or its memory cannot be opened.
            PeerLostError: A peer ended.

        Collective: yes.
        """
        own = self._own[segment.spec.name]
        offer = _Offer(
            own.file,
            this_process(),
            segment.nbytes,
            own.data,
            own.starts[group.name],
            own.log,
            0 if self.races is None else self.races.rank,
        )
        phase = f"segment {segment.spec.name!r}"
        texts = exchange.round(phase, offer.to_json(), groups=[group.name])[group.name]
        offers = [_Offer.from_json(text, group, rank) for rank, text in enumerate(texts)]
        near, across = _levels(offers, group)
        refused = b""
        try:
            for rank, theirs in enumerate(offers):
                _check_size(offer, theirs, group, rank)
            for rank in near:
                _check_namespace(offer, offers[rank], rank)
                self._map(own, offers[rank], group, rank)
        except (PermissionError, FileNotFoundError) as error:
            refused = str(error).encode()
        answers = exchange.round(f"{phase} mapped", refused, groups=[group.name])[group.name]
        if any(answers):
            self._map_by_name(own, offers, near, group, exchange, phase)
        counterparts = None
        if len(near) < group.size:
            more = group, across, exchange, f"{phase} counterparts"
            counterparts = connections_of(*more, segment.timeout)
            segment.health.on_break.append(counterparts.close)
        self._meet(segment, own, {rank: offers[rank] for rank in near}, group, counterparts)

    def settle(self) -> None:
        """Close the descriptors through which peers came in."""
        for own in self._own.values():
            own.settle()

    def _map(self, own: _Own, offer: _Offer, group: Group, rank: int) -> None:
        """Map a peer's file unless it is mapped already.

        Raises:
            OSError: The peer's file cannot be opened without a name.
            BackendError: It cannot be opened by its name either.
        """
        key = (offer.file.device, offer.file.inode)
        if rank == group.rank:
            assert own.memory is not None
            own.mapped[key] = own.memory
        if key in own.mapped:
            return
        try:
            fd = open_peer(offer.file)
        except (OSError, BackendError) as error:
            if is_gone(offer.process):
                when = "during the rendezvous"
                raise group.ended(rank, offer.process.pid, when) from None
            if isinstance(error, BackendError):
                if offer.file.name:
                    raise
                # A rank that gave up has closed its descriptor, and may have reused the number.
                raise FileNotFoundError(error.what) from error
            if not offer.file.name:  # there is another way
                raise
            raise BackendError(
                f"cannot open the shared memory of rank {rank}: {error.strerror}",
                expected="one /dev/shm, or one pid namespace, for all ranks",
                fix="run the ranks in one container, as one user",
                **group.here,
            ) from error
        with closing_fd(fd):
            own.mapped[key] = map_file(fd, offer.file.nbytes)

    def _map_by_name(
        self,
        own: _Own,
        offers: list[_Offer],
        near: Sequence[int],
        group: Group,
        exchange: Exchange,
        phase: str,
    ) -> None:
        """Peers may not open descriptors: use names for a moment. See [Note: nameless files]."""
        name = unguessable_name()
        texts = exchange.round(f"{phase} names", name.encode(), groups=[group.name])[group.name]
        try:
            names = [text.decode("ascii") for text in texts]
            named = [evolve(o.file, name=n) for o, n in zip(offers, names, strict=True)]
        except ValueError as error:
            raise _not_ours(group, "a peer") from error
        try:
            assert own.fd is not None
            publish(own.fd, name)
            exchange.round(f"{phase} published", b"", groups=[group.name])
            for rank in near:
                self._map(own, evolve(offers[rank], file=named[rank]), group, rank)
            exchange.round(f"{phase} mapped by name", b"", groups=[group.name])
        finally:
            # All names, not only this rank's: the owner may be what ended.
            for rank in near:
                remove(named[rank].name)

    def _meet(
        self,
        segment: Segment,
        own: _Own,
        offers: Mapping[int, _Offer],
        group: Group,
        counterparts: Counterparts | None,
    ) -> None:
        peers = []
        areas = []
        for rank, offer in offers.items():
            memory = own.mapped[offer.file.device, offer.file.inode]
            if rank == group.rank:
                peers.append(segment.tensor)
                areas.append(own.control)
            else:
                peers.append(torch.frombuffer(memory, dtype=torch.uint8, count=offer.nbytes))
                nbytes = (offer.log or offer.file.nbytes) - offer.data
                areas.append(ControlArea(memory, offer.data, nbytes))
            if own.watched is not None and offer.log:
                log = RaceLog(memory, offer.log, own.watched.detector.size)
                own.watched.add_peer(offer.world_rank, log, peers[-1].data_ptr(), offer.nbytes)
        make: Callable[..., Meeting] = Meeting
        if counterparts is not None:
            make = functools.partial(HostsMeeting, counterparts=counterparts)
        meeting = make(
            group,
            peers,
            areas,
            [offer.start for offer in offers.values()],
            [offer.process for offer in offers.values()],
            segment=segment.spec.name,
            timeout=segment.timeout,
            on_failure=segment.health.break_,
            watched=own.watched,
            world=[offer.world_rank for offer in offers.values()],
            near=tuple(offers),
        )
        segment.add_rendezvous(meeting)


def _not_ours(group: Group, who: str) -> BackendError:
    return BackendError(
        f"{who} sent a message that is not from this version of symmplan",
        fix="run the same version of symmplan on every rank",
        **group.here,
    )


def _levels(offers: Sequence[_Offer], group: Group) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What `counterparts_of` finds, for a group that can be served.

    Raises:
        BackendError: It is on several hosts that two levels do not serve.
    """
    hosts = [offer.process.host for offer in offers]
    per_host = {*Counter(hosts).values()}
    other = next((r for r, host in enumerate(hosts) if host != hosts[group.rank]), None)
    if other is not None and (len(per_host) > 1 or per_host == {1}):
        raise BackendError(
            f"memory='shm': ranks {group.rank} and {other} run on different hosts",
            expected="all ranks of the group on one host, or the same number, at least two, on "
            "each host",
            fix="use memory='nccl' with CUDA devices, or groups within one host",
            **group.here,
            ranks=(group.rank, other),
        )
    return counterparts_of(hosts, group.rank)


def _check_size(mine: _Offer, theirs: _Offer, group: Group, rank: int) -> None:
    if theirs.nbytes != mine.nbytes:
        raise BackendError(
            f"rank {rank} created the segment with another size",
            expected=f"{mine.nbytes} bytes",
            got=f"{theirs.nbytes} bytes",
            fix="run the same version of symmplan on every rank",
            **group.here,
        )


def _check_namespace(mine: _Offer, theirs: _Offer, rank: int) -> None:
    if theirs.process.namespace != mine.process.namespace:
        raise PermissionError(f"rank {rank} is in another pid namespace")
