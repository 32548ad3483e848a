"""Declare: which arguments and results of an op must be symmetric.

`register_symm_mem_args` and `symm_args` declare, `requirements` and `spec_for` answer. Besides
users' declarations there are a built-in catalogue of torch's own ops and torch's own registry.
Importing this package does not import torch; the first look-up does.
"""

from __future__ import annotations

from symmplan.registry.declare import (
    isolated,
    register_symm_mem_args,
    requirements,
    spec_for,
    symm_args,
    unregister,
)
from symmplan.registry.inventory import all_specs
from symmplan.registry.schema import bind_arguments, resolve_group_name

__all__ = [
    "all_specs",
    "bind_arguments",
    "isolated",
    "register_symm_mem_args",
    "requirements",
    "resolve_group_name",
    "spec_for",
    "symm_args",
    "unregister",
]
