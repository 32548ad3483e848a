"""The modules of an eager program, by the parameters that its ops read.

[Note: modules of an eager program]
    A recording sees ops, not modules. Global module hooks would show the modules, but torch warns
    of them where a module is compiled, and they reach programs of other threads. The local
    variables of a frame would, too, but before Python 3.13 reading them keeps tensors alive. So a
    node gets the module whose parameter it reads. Which module has a parameter is looked up once,
    when the recording is over.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from torch import nn

from symmplan.capture.apart import storage_key
from symmplan.torch_private.autograd import local_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import fx


def name_modules(graph: fx.Graph, owners: Mapping[fx.Node, str]) -> None:
    """Write into the nodes of a recorded graph which module each belongs to.

    A node belongs to the module of the first parameter that it reads. What is computed from
    parameters alone, such as a cast or a transpose, counts as a parameter.

    Args:
        graph: Its nodes get a ``meta["symmplan_module"]``.
        owners: The modules of the parameters among its placeholders.
    """
    parameters = dict(owners)
    for node in graph.nodes:
        read = [parameters[x] for x in node.all_input_nodes if x in parameters]
        if not read:
            continue
        node.meta["symmplan_module"] = read[0]
        if len(read) == len(node.all_input_nodes):
            parameters[node] = read[0]


def parameter_owners() -> dict[int, str]:
    """``{storage: name}`` of each parameter's module, by the module's name in its model.

    A storage is told by its `storage_key`. Parameters of the model itself are left out, because
    the model has no name.
    """
    owners: dict[int, str] = {}
    for model in _models():
        for path, module in model.named_modules():
            name = path.replace("_orig_mod.", "").removesuffix("_orig_mod")  # of torch.compile
            if not name:
                continue
            for parameter in module.parameters(recurse=False):
                local = local_part(parameter)
                if local.layout is torch.strided and not nn.parameter.is_lazy(local):
                    owners.setdefault(storage_key(local), name)
    return owners


def _models() -> Iterator[nn.Module]:
    """The modules of this process that are part of no other module, the oldest first."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and _ready(x)]
    parts = {id(part) for module in modules for part in module.children()}
    return (module for module in modules if id(module) not in parts)


def _ready(module: nn.Module) -> bool:
    """Whether ``nn.Module.__init__`` has run."""
    return {"_modules", "_parameters"} <= vars(module).keys()
