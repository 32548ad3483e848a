"""The pool of ranks that every multi-rank test stands on; see `symmplan.launcher.ranks`.

from ranks import RankPool, run_ranks

def work(rank, world_size, n):           # module level: ranks import it by name
    ...
    return plain_data

assert run_ranks(work, 2, 5) == [...]     # one value per rank; RanksFailed if any rank failed

with RankPool(3) as pool:                 # processes and their process group are kept
    pool.run(work, 5)
    outcomes = pool.outcomes(work, 6)     # never raises for what ranks do: look at .error
    pool.start(work, 7); pool.kill(1); outcomes = pool.collect()

two = pool_of(2)                          # the same as a fixture, for all tests of a module

On a busy machine everything takes longer. So limits grow with what starting the ranks took, and
that does not count towards them. Ranks that are late all the same are HarnessTimeout, which says
nothing of their results.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import torch

from symmplan.launcher import ranks

if TYPE_CHECKING:
    from symmplan.launcher.ranks import RankOutcome

_PRELOAD = ["torch.distributed", "symmplan.memory", "symmplan.planner.verify"]
_PRELOAD += ["pytest", "hypothesis.strategies", "numpy.ma"]  # what the files of tests import
if not torch.cuda.is_available():  # Inductor asks devices for their properties, and forks cannot
    _PRELOAD += ["symmplan.integrate.compile.backend", "symmplan.integrate.fsdp.apply"]
    _PRELOAD += ["symmplan.integrate.eager.session", "torch._inductor.compile_fx"]
    _PRELOAD += ["torch.distributed.tensor.experimental"]  # what Dynamo imports for a first graph
multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)


class RanksFailed(AssertionError):  # noqa: N818
    """At least one rank did not return; ``outcomes`` has them all.

    ``call`` is what they were asked to do: of random tests, what comes after a rank's death fails,
    too, so that the smallest failing example may be any.
    """

    def __init__(self, outcomes: list[RankOutcome], call: str = "") -> None:
        self.outcomes = outcomes
        said = [o.describe() for o in outcomes if not o.ok]
        super().__init__("\n".join([*said, f"in {call}"] if call else said))


class HarnessTimeout(RanksFailed):
    """Ranks were still at work when the harness's limit was over, and none of them failed."""


#: Seconds in which ranks start on two quiet cores, the first ones of a process included.
_QUIET = 10.0


class RankPool(ranks.RankPool):
    """Ranks whose failures are those of the test."""

    _failed = ""

    def collect(self, timeout=None, ranks=None):
        """See `symmplan.launcher.ranks.RankPool.collect`; the limit is that of a quiet machine."""
        limit = self.timeout if timeout is None else timeout
        return super().collect(limit * max(1.0, self.seconds_to_start / _QUIET), ranks)

    def run(self, fn, *args, timeout=None) -> list:
        """Call ``fn(rank, world_size, *args)`` on every rank; its values, or RanksFailed."""
        first = not self._dead
        outcomes = self.outcomes(fn, *args, timeout=timeout)
        if not all(o.ok for o in outcomes):
            if first:
                self._failed = f"{getattr(fn, '__qualname__', fn)}{args}"
            failed = [o for o in outcomes if not o.ok]
            late = first and all(o.hung is not None for o in failed)
            raise (HarnessTimeout if late else RanksFailed)(outcomes, self._failed)
        return [o.value for o in outcomes]


def run_ranks(fn, world_size, *args, timeout=60.0, **pool) -> list:
    """Start ``world_size`` processes, call ``fn(rank, world_size, *args)``, return the values."""
    with RankPool(world_size, timeout=timeout, **pool) as started:
        return started.run(fn, *args)


def pool_of(*sizes, setup=None, teardown=None, **options):
    """A fixture: ranks that the tests of a module share; for several sizes one after the other.

    ``setup(rank, world_size)`` runs on each before the tests, ``teardown`` behind them; ``options``
    are those of `RankPool`.
    """
    import pytest

    @pytest.fixture(scope="module", params=sizes if len(sizes) > 1 else None)
    def ranks(request):
        with RankPool(getattr(request, "param", sizes[0]), **options) as pool:
            if setup is not None:
                pool.run(setup)
            yield pool
            if teardown is not None:
                pool.run(teardown)

    return ranks
