"""What a planned collective is expected to run as, for a check of what ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from symmplan.model import AlgorithmName


@frozen(kw_only=True)
class Expected:
    """A collective as it was planned.

    Attributes:
        name: The call in the program, or the FSDP module.
        op: Qualified name of the collective's op.
        group: Name of the process group.
        memory: Name of the memory backend.
        nbytes: Bytes of its inputs on one rank; for FSDP2 as in `Choice.nbytes`.
        dtype: Element type, ``"float32"``.
        algorithm: How it is to run.
        reduction: ``"sum"`` and so on, where it is known.
        target: The op that is called instead, if that identifies it.
        launches: How often that op is called.
    """

    name: str
    op: str
    group: str
    memory: str
    nbytes: int
    dtype: str
    algorithm: AlgorithmName
    reduction: str = ""
    target: str = ""
    launches: int = 1
