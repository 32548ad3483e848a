"""After passes, every node has the value that running the whole graph again would give it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from examples import examples
from symmplan.capture.graphs import Values, example_values
from symmplan.integrate.compile.refresh import note, refresh_changed, refresh_values

A = torch.ops.aten
_KINDS = ("sin", "t", "slice", "add", "split", "clone", "relu_", "view")


def _traced(kinds):
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(4, 4))

    def program(x):
        values = [x]
        for kind, at in kinds:
            v = values[at % len(values)]
            if kind == "split":
                values += torch.split(v, max(1, v.shape[0] // 2))[:2]
            elif kind == "relu_":
                values.append(v.clone().relu_())
            else:
                values.append(
                    {
                        "sin": lambda v: v.sin(),
                        "t": lambda v: v.t(),
                        "slice": lambda v: v[:2],
                        "add": lambda v: v + v,
                        "clone": lambda v: v.clone(),
                        "view": lambda v: v.reshape(-1, 1),
                    }[kind](v)
                )
        return values

    gm = make_fx(program, tracing_mode="real")(x)
    refresh_values(gm, [x], mode)
    return gm, x, mode


def _pass(gm, choices):
    """Drop copies, make copies, work in place, swap ops: as passes do."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    for which, how in choices:
        node = nodes[which % len(nodes)]
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if node._erased or source is None:
            continue
        if how == "drop" and node.target is A.clone.default:
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
        elif how == "copy":
            with gm.graph.inserting_after(node):
                copy = gm.graph.call_function(A.clone.default, (node,))
            tensor = isinstance(node.meta["val"], torch.Tensor)
            if tensor:
                node.replace_all_uses_with(copy, delete_user_cb=lambda u, c=copy: u is not c)
            else:
                gm.graph.erase_node(copy)
        elif how == "dense" and node.target is A.clone.default:
            node.kwargs = {"memory_format": torch.contiguous_format}
        elif how == "in place" and node.target is A.sin.default:
            node.target = A.sin_.default
        elif how == "other" and node.target is A.sin.default:
            node.target = A.cos.default
    gm.graph.lint()


def _aliases(gm):
    values = Values.of(gm.graph, example_values(gm.graph, gm, None))
    names = {v: (v[0].name, v[1]) for v in values.tensors}
    return {
        names[v]: (
            names[values.find(v)],
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
        )
        for v, t in values.tensors.items()
    }


@examples(100, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 9)), min_size=1, max_size=10),
    choices=st.lists(
        st.tuples(
            st.integers(0, 20), st.sampled_from(["drop", "copy", "dense", "in place", "other"])
        ),
        max_size=6,
    ),
)
@example(kinds=[("sin", 0), ("t", 1), ("view", 2)], choices=[(2, "drop")])
@example(kinds=[("sin", 0), ("split", 0), ("t", 0), ("view", 4)], choices=[(5, "drop")])
@example(kinds=[("t", 0), ("clone", 1), ("sin", 2), ("t", 3)], choices=[(1, "dense")])
def test_what_changed_is_run_again_and_nothing_is_missed(kinds, choices):
    gm, x, mode = _traced(kinds)
    noted = note(gm)
    _pass(gm, choices)
    try:
        refresh_changed(gm, [x], mode, noted)
    except (RuntimeError, ValueError) as error:  # the copy that was dropped made a view possible
        with pytest.raises(type(error)):
            refresh_values(gm, [x], mode)
        return
    quick = _aliases(gm)
    refresh_values(gm, [x], mode)
    assert quick == _aliases(gm)


def test_nothing_is_run_where_nothing_changed():
    gm, x, mode = _traced([("sin", 0), ("add", 1), ("t", 2)])
    before = {n: n.meta["val"] for n in gm.graph.nodes if "val" in n.meta}
    refresh_changed(gm, [x], mode, note(gm))
    assert all(n.meta["val"] is v for n, v in before.items())
