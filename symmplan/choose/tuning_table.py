"""Algorithms that were measured elsewhere, in a file; and the rules for what was measured nowhere.

[Note: rules]
    These rules apply to collectives that were not measured and that no row of a table fits. In
    shared memory every collective is symmetric, and so are all-reduces over CUDA's mappings, where
    a kernel adds them up. Else a collective of less than 1 MiB is ordinary in a device's memory; a
    larger gather runs on copy engines if the memory backend has them; a larger reduce-scatter of
    FSDP2 is a push; all others are ordinary. In groups that two levels serve, "symmetric" is
    two-level.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from attrs import asdict, field, frozen

from symmplan.errors import OptionError
from symmplan.memory import BACKENDS
from symmplan.model import PUSHES, AlgorithmName
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORMAT = "symmplan-choices"
_VERSION = 1
#: Smaller collectives than this, in bytes, gain nothing on devices.
_SMALL = 1 << 20
#: A row says nothing of sizes further away than this factor.
_FAR = 4


@frozen
class TuningRow:
    """How one kind and size of collective is to run.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, or an op's qualified name.
        ranks: How many ranks the group had.
        nbytes: Bytes, as in `symmplan.choose.choice.Choice`.
        algorithm: The algorithm that was chosen.
        seconds: ``{algorithm: time}`` that it was chosen by.
    """

    op: str
    ranks: int
    nbytes: int
    algorithm: AlgorithmName
    seconds: Mapping[str, float] = field(factory=dict, hash=False)

    @property
    def levels(self) -> bool:
        """Whether it is of a group on several hosts, which two levels serve."""
        return "two-level" in (self.algorithm, *self.seconds)


@frozen
class Table:
    """Choices that were measured on some machine.

    Attributes:
        memory: The memory backend of the measurement.
        rows: The measured choices.
    """

    memory: str
    rows: tuple[TuningRow, ...]

    def algorithm(
        self, op: str, ranks: int, nbytes: int, *, levels: bool = False
    ) -> AlgorithmName | None:
        """The algorithm of the row that is nearest, in ranks, then in bytes; None if none is near.

        Rows of groups in two levels say nothing of others, and others nothing of these.

        >>> table = Table("nccl", (TuningRow("all_gather", 8, 1 << 24, "copy engine"),))
        >>> table.algorithm("all_gather", 512, 1 << 25), table.algorithm("all_gather", 512, 1 << 12)
        ('copy engine', None)
        """
        alike = [r for r in self.rows if r.op == op and r.levels == levels]
        near = [r for r in alike if _apart(r.nbytes, nbytes) <= math.log2(_FAR)]
        found = min(
            near,
            key=lambda r: (_apart(r.ranks, ranks), _apart(r.nbytes, nbytes), r.nbytes),
            default=None,
        )
        return None if found is None else found.algorithm

    @property
    def digest(self) -> str:
        """Equal for equal tables."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The table as JSON, which `read_table` reads."""
        rows = [asdict(row) for row in self.rows]
        head = {"format": _FORMAT, "version": _VERSION, "memory": self.memory}
        return json.dumps({**head, "rows": rows}, indent=1)


def is_table(choose: object) -> bool:
    """Whether ``choose=`` is the path of a table: a path, or a text that ends with ``.json``."""
    if isinstance(choose, str):
        return choose.endswith(".json")
    return isinstance(choose, os.PathLike)


def read_table(path: str) -> Table:
    """A table from its file; read once in a process.

    Raises:
        OptionError: There is no such file, or it is no table.
    """
    found: Table | None = PROCESS.tables.get(path)
    if found is not None:
        return found
    try:
        found = PROCESS.tables[path] = _table(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it has another format"
        raise OptionError(
            f"{path!r} is not a tuning table: {why}",
            expected=f"a file of format {_FORMAT} {_VERSION}",
            got=f"{type(error).__name__}: {error}",
            fix=f"write it with: symmplan bench comm --device cuda -o {path}",
        ) from error
    return found


def _table(data: Any) -> Table:
    if data["format"] != _FORMAT or data["version"] != _VERSION:
        raise ValueError(f"{data['format']} {data['version']}")
    return Table(str(data["memory"]), tuple(map(_row, data["rows"])))


def _row(data: Any) -> TuningRow:
    row = TuningRow(
        str(data["op"]), int(data["ranks"]), int(data["nbytes"]), data["algorithm"], data["seconds"]
    )
    if row.algorithm not in get_args(AlgorithmName) or row.ranks < 1 or row.nbytes < 1:
        raise ValueError(row)
    return row


def ruled(
    table: Table | None,
    op: str,
    ranks: int,
    nbytes: int,
    memory: str,
    *,
    pushes: bool = False,
    levels: bool = False,
) -> tuple[AlgorithmName, str]:
    """The algorithm of a collective, and why it stays in ordinary memory; see [Note: rules].

    Args:
        table: The table of measured choices, or None.
        op: As in `TuningRow`.
        ranks: As in `TuningRow`.
        nbytes: As in `TuningRow`.
        memory: Name of the memory backend.
        pushes: Whether it can be made of pushes.
        levels: Whether its group is served in two levels.
    """
    found = None if table is None else table.algorithm(op, ranks, nbytes, levels=levels)
    if found in PUSHES and not pushes:
        found = "symmetric"
    if found is not None:
        return found, "" if found != "ordinary" else "the tuning table says so"
    if not BACKENDS[memory].devices:
        return "symmetric", ""
    if "all_reduce" in op and memory == "cuda" and not levels:
        return "symmetric", ""
    if nbytes < _SMALL:
        return "ordinary", f"less than {_SMALL} bytes gain nothing in symmetric memory"
    if "all_gather" in op and BACKENDS[memory].engines:
        return "copy engine", ""
    if pushes:
        return "push", ""
    return "ordinary", "by rule it gains nothing in symmetric memory"


def _apart(a: int, b: int) -> float:
    return abs(math.log2(a) - math.log2(max(b, 1)))
