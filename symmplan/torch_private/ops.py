"""Torch's ops: classes of the objects that are called, and trees of their arguments."""

# ruff: noqa: F401 (they are here for who asks)

from symmplan.torch_private.table.ops import OPS, VALUES

OPS.require()
VALUES.require()

from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
