"""Dispatch modes that see every op of a program, also of the functions that it compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.torch_private.compilers import run_op_by_op
from symmplan.torch_private.ops import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self


class OpByOpMode(TorchDispatchMode):
    """A mode below which compiled functions run op by op.

    Dynamo compiles nothing below a dispatch mode. But some torch never compile again what ran so
    once (2.11 and 2.13), and since 2.13 functions that were compiled with ``fullgraph=True`` raise.
    Higher-order operators are given to the mode, too; torch would refuse them otherwise.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depth = 0
        self._compile_again: Callable[[], None]

    def __enter__(self) -> Self:
        if not self._depth:
            self._compile_again = run_op_by_op()
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            self._compile_again()
