"""Plan a program of two streams, and see what a wait between them saves.

Two layers are gathered on a communication stream and used on a compute stream. With a wait, the
second gather may take the bytes of the first; without it, nothing orders them.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import symmplan
from symmplan.model import Access, Buffer, Operation

MIB = 1 << 20


def program(*, wait: bool) -> symmplan.Problem:
    """Gather 0 and 1 on one stream, use them on another."""
    names = [f"{what}.{layer}" for layer in range(2) for what in ("gather", "use")]
    edges = [("gather.0", "use.0"), ("gather.1", "use.1")]
    if wait:
        edges.append(("use.0", "gather.1"))
    return symmplan.Problem(
        buffers=[Buffer(f"layer.{layer}", 8 * MIB, group="tp") for layer in range(2)],
        operations=[
            Operation(
                name,
                stream="communication" if "gather" in name else "compute",
                group="tp" if "gather" in name else None,
                handshake="gather" in name,
                release="gather" in name,
            )
            for name in names
        ],
        accesses=[
            Access(name, f"layer.{name[-1]}", write="gather" in name, remote="gather" in name)
            for name in names
        ],
        edges=edges,
    )


def main() -> None:
    """Plan both programs."""
    for wait in (False, True):
        plan = symmplan.plan(program(wait=wait))
        plan.verify()
        print(f"{'with' if wait else 'without'} the wait: {plan.peak_bytes // MIB} MiB")
        print(plan.summary())
        with TemporaryDirectory() as folder:
            page = Path(folder) / "plan.html"
            plan.to_html(page)
            print(f"the picture has {page.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
