"""Ranks on CUDA devices of this host, one on each: what tests of GPUs have in common.

    SHARE_DEVICE=1 python -m pytest -m gpu tests/gpu/test_fsdp_programs_gpu.py

lets ranks share the devices that there are: streams, events and graphs of CUDA are real, peers are
reached by CUDA's own mappings (memory="cuda"), and NCCL takes ranks of one device for different
hosts. What asks for memory="nccl" or for copy engines fails there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

import pytest
import torch
from ranks import RankPool

#: Whether ranks share devices.
SHARED = os.environ.get("SHARE_DEVICE") == "1"


def needs_devices(count=2):
    """The marks of a test that needs so many devices."""
    count = min(count, 1) if SHARED else count
    missing = torch.cuda.device_count() < count
    missing = pytest.mark.skipif(missing, reason=f"needs {count} CUDA devices")
    return [pytest.mark.gpu, pytest.mark.ranks, missing]


def worlds(*counts):
    """Numbers of ranks as parameters, each skipped where there are fewer devices."""
    return [pytest.param(count, marks=needs_devices(count)) for count in counts]


@contextlib.contextmanager
def ranks_on(count, make=RankPool, **options):
    """Ranks over NCCL; ``make(count, **options)`` starts them."""
    init = None if SHARED else "nccl"
    with make(count, init=init, **options) as ranks, tempfile.TemporaryDirectory() as folder:
        if SHARED:
            RankPool.outcomes(ranks, share_device, folder)
        yield ranks


def pool_on(*counts, scope="module", **options):
    """A fixture: `ranks_on`, for several counts one after the other.

    What is pending ends before they do.
    """

    @pytest.fixture(scope=scope, params=worlds(*counts) if len(counts) > 1 else None)
    def pool(request):
        with ranks_on(getattr(request, "param", counts[0]), **options) as ranks:
            yield ranks
            RankPool.outcomes(ranks, finish)

    return pool


def share_device(rank, world, folder):
    """Ranks meet over NCCL, on one device after the other.

    NCCL refuses two ranks of one host on one device. Where there are several devices, a host that
    a test has given a rank is its host for NCCL, too.
    """
    import torch.distributed as dist

    from symmplan.memory.backends import torch_symm

    devices, host = torch.cuda.device_count(), os.environ.get("NCCL_HOSTID")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["NCCL_IB_DISABLE"] = "1"
    if devices == 1 or host is None:
        os.environ["NCCL_HOSTID"] = f"sharing {rank // devices}"
    torch.cuda.set_device(rank % devices)
    torch.cuda.set_device = lambda _: None  # programs set the one of their rank
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    dist.all_reduce(torch.ones(1, device="cuda"))
    del os.environ["NCCL_HOSTID"]  # which NCCL has read
    if host is not None:
        os.environ["NCCL_HOSTID"] = host
    torch_symm.serves_nccl = torch_symm.has_windows = lambda _: False


def finish(rank, world):
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.destroy_process_group()
