"""Ops of torch's symmetric memory that torch itself does not trace, in compiled programs.

Here they have CPU kernels of the tests' own, in ordinary memory; `gpu/test_compile_gpu.py` runs
torch's.
"""

from __future__ import annotations

import pytest
import torch
from ranks import RankPool

pytestmark = pytest.mark.ranks

_LIBRARY = []


def _kernels():
    import torch.distributed as dist

    if _LIBRARY:
        return
    library = torch.library.Library("symm_mem", "FRAGMENT")
    _LIBRARY.append(library)

    def all_reduce_(x, op, group):
        dist.all_reduce(x)
        return x

    def all_reduce_out(x, op, group, out):
        out.copy_(x)
        dist.all_reduce(out)
        return out

    def all_to_all(x, out, group):
        dist.all_to_all_single(out, x)
        return out

    def broadcast(x, root, group):
        dist.broadcast(x, root)
        return x

    library.impl("two_shot_all_reduce_", all_reduce_, "CPU")
    library.impl("one_shot_all_reduce_out", all_reduce_out, "CPU")
    library.impl("nvshmem_all_to_all", all_to_all, "CPU")
    library.impl("nvshmem_broadcast", broadcast, "CPU")


def _program(x, group):
    ops = torch.ops.symm_mem
    total = ops.two_shot_all_reduce_(x * 2, "sum", group)
    again = ops.one_shot_all_reduce_out(total.sin(), "sum", group, torch.empty_like(x))
    received = torch.empty_like(x)
    ops.nvshmem_all_to_all(again + 1, received, group)
    ops.nvshmem_broadcast(total, 1, group)
    return received * 2, again, total + x


def _compiled(rank, size, inner):
    import torch.distributed as dist

    import symmplan

    _kernels()
    torch._dynamo.reset()
    torch.manual_seed(rank)
    x = torch.randn(4, 8)
    group = dist.group.WORLD.group_name
    expected = _program(x, group)
    backend = symmplan.backend(inner=inner, timeout=30.0, debug=inner == "eager" or "poison")
    compiled = torch.compile(_program, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, group), expected)
    left_out = {(u.op, u.reason) for p in backend.plans for u in p.unplanned}
    backend.release()
    return left_out


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_ops_that_return_what_they_wrote_are_traced(inner):
    with RankPool(2, timeout=120.0) as two:
        for found in two.run(_compiled, inner):
            # Named as they are in the program.
            assert {op for op, _ in found} == {
                "symm_mem::two_shot_all_reduce_.default",
                "symm_mem::one_shot_all_reduce_out.default",
                "symm_mem::nvshmem_all_to_all.default",
                "symm_mem::nvshmem_broadcast.default",
            }
            assert {reason for _, reason in found} == {
                "the op needs device memory, and this program runs on shm"
            }


def test_what_makes_its_result_has_a_fake_form():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from symmplan.integrate.compile import ops

    ops.load()
    with FakeTensorMode():
        x = torch.empty(4, 8)
        made = torch.ops.symm_mem.multimem_one_shot_all_reduce(x, "sum", "group")
    assert made.shape == x.shape
