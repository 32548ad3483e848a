"""Problems from plain intervals, also those of the packing benchmarks' files."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from symmplan.errors import ProblemError
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner.check import MAX_BYTES

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

__all__ = ["problem_from_csv", "problem_from_intervals"]

#: A row of a benchmark file is a name and three numbers; anything longer is another kind of file.
MAX_CSV_BYTES = 1 << 30


def problem_from_intervals(
    intervals: Iterable[tuple[str, int, int, int]], *, align: int = 1
) -> Problem:
    """See `Problem.from_intervals`.

    Time is cut where an interval begins or ends; each piece becomes one operation ``t<begin>``,
    and a buffer is accessed in the first and the last piece of its interval.
    """
    try:
        rows: list[tuple[Any, ...]] = [tuple(r) for r in intervals]
    except TypeError as error:
        raise ProblemError(
            f"the intervals cannot be read: {error}",
            expected="tuples (name, begin, end, nbytes)",
            got=f"a {type(intervals).__name__}",
            fix="give one tuple per buffer, times and bytes as int",
        ) from error
    for row in rows:
        if len(row) != 4 or not all(
            isinstance(v, Integral) and not isinstance(v, bool) for v in row[1:]
        ):
            raise ProblemError(
                f"the interval {row!r} is not of the form (name, begin, end, nbytes)",
                expected="a name and three whole numbers",
                got=repr(row),
                fix="give one tuple per buffer, times and bytes as int",
            )
        if row[1] >= row[2]:
            raise ProblemError(
                f"buffer {row[0]!r} lives in [{row[1]}, {row[2]}), which is empty",
                expected="begin before end; intervals are half-open",
                got=f"[{row[1]}, {row[2]})",
                fix="drop the buffer or correct its interval",
                buffer=row[0],
            )
    rows = [(name, *map(int, numbers)) for name, *numbers in rows]
    times = sorted({t for _, begin, end, _ in rows for t in (begin, end)})
    place = {t: i for i, t in enumerate(times)}
    names = [f"t{t}" for t in times]
    accesses: list[Access] = []
    for name, begin, end, _ in rows:
        first, last = names[place[begin]], names[place[end] - 1]
        accesses.append(Access(first, name, write=True))
        if last != first:
            accesses.append(Access(last, name))
    return Problem(
        buffers=tuple(Buffer(name=n, nbytes=size, align=align) for n, _, _, size in rows),
        operations=tuple(
            Operation(name, time=between)
            for name, between in zip(names[:-1], pairwise(times), strict=True)
        ),
        accesses=tuple(accesses),
    )


def problem_from_csv(path: str | os.PathLike[str], text: str | None = None) -> Problem:
    """See `Problem.from_csv`; columns besides ``id,lower,upper,size`` are ignored.

    Args:
        path: The file.
        text: What it has, if that was read already.
    """
    try:
        if text is None and Path(path).stat().st_size > MAX_CSV_BYTES:
            raise ProblemError(
                f"{path} has more than {MAX_CSV_BYTES} bytes",
                expected="a table of buffers",
                got="a file too large to be one",
                fix="check the path",
            )
        text = Path(path).read_text(encoding="utf-8") if text is None else text
        lines = io.StringIO(text.removeprefix("\ufeff"), newline="")
        return problem_from_intervals(_rows(path, csv.DictReader(lines)))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise ProblemError(
            f"{path} cannot be read: {e}",
            expected="a UTF-8 CSV file with the columns id,lower,upper,size",
            got=type(e).__name__,
            fix="check the path and the file's format",
        ) from e


def _wrong_row(
    path: object, line: int, what: str, expected: str, got: object, column: str = ""
) -> NoReturn:
    raise ProblemError(
        f"{path}, line {line}: {what}",
        expected=expected,
        got=got,
        fix="correct the line or drop it",
        line=line,
        column=column,
    )


def _number(path: object, line: int, column: str, text: str) -> int:
    """The number in a column; a size may also be one that is too large, ``1e29``."""
    try:
        number: float = int(text)
    except ValueError:
        number = math.nan
        with contextlib.suppress(ValueError):
            number = float(text)
        if column != "size" or not number > MAX_BYTES:
            _wrong_row(path, line, f"{column} is {text!r}", "a whole number", repr(text), column)
    if column == "size" and number > MAX_BYTES:
        expected = f"at most {MAX_BYTES} bytes"
        _wrong_row(path, line, f"the size {text.strip()} is too large", expected, text, column)
    return int(number)


def _rows(
    path: str | os.PathLike[str], reader: csv.DictReader[str]
) -> list[tuple[str, int, int, int]]:
    columns = [c.strip() for c in reader.fieldnames or ()]
    reader.fieldnames = columns
    missing = [c for c in ("id", "lower", "upper", "size") if c not in columns]
    if missing:
        raise ProblemError(
            f"{path} lacks the column {missing[0]!r}",
            expected="the columns id,lower,upper,size",
            got=",".join(columns) or "no header line",
            fix="name the columns in the first line",
            column=missing[0],
        )
    rows: list[tuple[str, int, int, int]] = []
    lines: dict[str, int] = {}
    for row in reader:
        line = reader.line_num
        if None in row.values():
            given = sum(value is not None for value in row.values())
            _wrong_row(path, line, f"the line has {given} values", f"{len(columns)}", given)
        lower, upper, nbytes = (_number(path, line, c, row[c]) for c in ("lower", "upper", "size"))
        name = row["id"].strip()
        if nbytes <= 0:
            expected = "a size of one byte or more"
            _wrong_row(path, line, f"size is {nbytes}", expected, nbytes, "size")
        if lower >= upper:
            what = f"buffer {name!r} lives in [{lower}, {upper}), which is empty"
            _wrong_row(path, line, what, "lower before upper", f"[{lower}, {upper})", "upper")
        if name in lines:
            what = f"buffer {name!r} was listed before, in line {lines[name]}"
            _wrong_row(path, line, what, "unique names", f"{name!r} again", "id")
        lines[name] = line
        rows.append((name, lower, upper, nbytes))
    if not rows:
        raise ProblemError(
            f"{path} has no buffers",
            expected="a line for each buffer under the header",
            got="a header alone",
            fix="write the buffers below the header, one per line",
        )
    return rows
