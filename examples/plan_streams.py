"""Plan a program of two streams, and see what a wait between them saves.

Two layers are gathered on a communication stream and used on a compute stream. With a wait, the
second gather may take the bytes of the first; without it, nothing orders them.

    python examples/plan_streams.py

prints both plans, and draws them side by side in `plan_streams.html`.
"""

from pathlib import Path

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
    plans = [symmplan.plan(program(wait=wait)) for wait in (False, True)]
    for plan, wait in zip(plans, ("without", "with"), strict=True):
        plan.verify()
        print(f"{wait} the wait: {plan.peak_bytes // MIB} MiB")
        print(plan.summary(), end="\n\n")
    page = Path("plan_streams.html").resolve()
    plans[0].to_html(page, beside=plans[1])
    print(f"open {page} in a browser")


if __name__ == "__main__":
    main()
