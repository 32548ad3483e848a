"""Views of a plan: nothing is lost, nothing is forged, equal plans give equal texts."""

from __future__ import annotations

import html.parser
import json
import re

import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st
from steps import lines_of

from examples import examples
from symmplan.choose.choice import Choice
from symmplan.model import Access, Buffer, Operation, Plan, Problem, Unplanned
from symmplan.planner import plan as make_plan
from symmplan.report.data import live_ranges, plan_facts, topological
from symmplan.report.format import count, size, table, visible
from symmplan.report.html import plan_html
from symmplan.report.text import plan_summary

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "]]>",
    "&lt;b&gt;",
    "\"'><img src=x onerror=alert(3)>",
    "line\nbreak\r\x1b[31mred\x00",
    "\u202egnirts\u2028",
    "{fingerprint}",
    "%s",
    "\\u003c",
]
names = st.text(min_size=1, max_size=8) | st.sampled_from(HOSTILE)


@st.composite
def plans(draw, *, most: int = 8) -> Plan:
    """A plan of a random program: several streams, waits, hostile names."""
    steps = draw(st.lists(names, min_size=1, max_size=most, unique=True))
    streams = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    operations = [
        Operation(name, stream=draw(st.sampled_from(streams)), op=draw(names)) for name in steps
    ]
    edges = []
    for _ in range(draw(st.integers(0, 3)) if len(steps) > 1 else 0):
        later = draw(st.integers(1, len(steps) - 1))
        edges.append((steps[draw(st.integers(0, later - 1))], steps[later]))
    buffers, accesses = [], []
    for name in draw(st.lists(names, max_size=most, unique=True)):
        persistent = draw(st.integers(0, 9)) == 0
        nbytes = draw(st.integers(1, 5000))
        buffers.append(
            Buffer(name, nbytes, op=draw(names), where=draw(names), persistent=persistent)
        )
        used = draw(st.lists(st.sampled_from(steps), min_size=1, max_size=3, unique=True))
        accesses += [Access(step, name, write=i == 0) for i, step in enumerate(used)]
    left_out = st.builds(Unplanned, names, names, names, names, st.none() | st.integers(0, 1 << 40))
    unplanned = draw(st.lists(left_out, max_size=3))
    return make_plan(Problem(buffers, operations, accesses, edges, unplanned=unplanned))


def simple(name: str = "a", **more) -> Plan:
    problem = Problem([Buffer(name, 512, **more)], [Operation("op")], [Access("op", name)])
    return make_plan(problem)


class _Page(html.parser.HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "input", "br"}:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


# ---- HTML ------------------------------------------------------------------------------------


def _skeleton(text: str) -> list[tuple[str, dict]]:
    return _Page(text).tags


@examples(60)
@given(plans())
def test_no_name_becomes_html(plan):
    """The page's elements and attributes are the same whatever the names are."""
    assert _skeleton(plan_html(plan)) == _skeleton(plan_html(simple()))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name):
    text = plan_html(simple(name, op=name, where=name, dtype=name))
    assert _skeleton(text) == _skeleton(plan_html(simple()))
    page = _Page(text)
    data, script = page.texts["script"]
    assert json.loads(data)["buffers"][0]["name"] == name
    assert "<" not in data
    assert name not in script


@pytest.mark.parametrize("name", HOSTILE)
def test_collectives_have_the_milliseconds_that_were_measured(name):
    measured = {"ordinary": 2.1e-3, "symmetric": 1.59e-3, "copy engine": 113e-6}
    choices = [
        Choice("all_gather", 416 << 20, "bfloat16", name, 2, measured, "copy engine"),
        Choice(f"c10d::{name}", 64, "float32", "w", 2, {}, "ordinary", ruled=name),
    ]
    plan = simple()
    last = "ordinary 2.1 ms, symmetric 1.59 ms, copy engine 0.113 ms"
    texts = _Page(plan_html(plan, choices=choices)).texts
    assert "beside it in ordinary memory" in texts["dt"]
    cells = texts["td"]
    assert "".join(cells[:5]) == f"all_gathergroup {visible(name)}416 MiBcopy engine{last}"
    assert cells[-1] == visible(name)
    (first,) = (line for line in plan.summary(choices).splitlines() if "all_gather" in line)
    assert first.endswith(f"416 MiB  copy engine  {last}")
    assert plan.summary([]) == plan.summary()
    assert "collectives:" not in plan.summary()


@examples(40)
@given(plans())
def test_the_page_carries_the_whole_plan(plan):
    data = json.loads(_Page(plan_html(plan)).texts["script"][0])
    found = {
        b["name"]: (data["segments"][b["segment"]]["name"], b["a"], b["b"]) for b in data["buffers"]
    }
    assert found == {n: (p.segment, p.offset, p.end) for n, p in plan.placements.items()}
    assert [u["reason"] for u in data["unplanned"]] == [u.reason for u in plan.unplanned]
    assert [s["nbytes"] for s in data["segments"]] == [s.nbytes for s in plan.segments]


@examples(40)
@given(plans())
def test_equal_plans_give_equal_pages(plan):
    again = Plan.from_json(plan.to_json())
    assert plan_html(plan) == plan_html(plan)
    assert plan_html(again) == plan_html(Plan.from_json(again.to_json()))
    assert again.summary() == plan.summary()


def test_the_page_loads_nothing(tmp_path):
    simple().to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert not re.findall(r"https?://|\bsrc=|\bhref=|@import|\burl\(", text)
    (policy,) = [a["content"] for t, a in _Page(text).tags if "http-equiv" in a]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_policy_admits_the_script_and_the_style_of_the_page():
    import base64
    import hashlib

    page = _Page(plan_html(simple()))
    (policy,) = [a["content"] for t, a in page.tags if "http-equiv" in a]
    for text in (page.texts["script"][1], page.texts["style"][0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


@pytest.mark.further
def test_ten_thousand_buffers_make_a_small_page_with_little_work():
    def page(count):
        intervals = [(f"b{i}", i, i + 3, 4096 + i % 7) for i in range(count)]
        plan = make_plan(Problem.from_intervals(intervals))
        return lines_of(lambda: texts.append(plan_html(plan)))

    texts = []
    small, large = page(1000), page(10_000)
    assert 0 < small < large < 20 * small  # its square would be 100
    assert len(texts[1]) < 4_000_000


# ---- the time axis ---------------------------------------------------------------------------


@examples(60)
@given(plans())
def test_the_axis_keeps_the_order_of_the_program(plan):
    problem = plan.problem
    order = topological(problem)
    assert sorted(order) == list(range(len(problem.operations)))
    position = {problem.operations[i].name: at for at, i in enumerate(order)}
    for earlier, later in problem.edges:
        assert position[earlier] < position[later]
    for stream in {o.stream for o in problem.operations}:
        of_stream = [position[o.name] for o in problem.operations if o.stream == stream]
        assert of_stream == sorted(of_stream)


@examples(60)
@given(plans())
def test_rectangles_never_overlap(plan):
    live = live_ranges(plan.problem, topological(plan.problem))
    shown = sorted(plan.placements.items())
    for i, (one, at) in enumerate(shown):
        for two, other in shown[:i]:
            bytes_meet = (
                at.segment == other.segment and at.offset < other.end and other.offset < at.end
            )
            time_synchronizes = live[one][0] < live[two][1] and live[two][0] < live[one][1]
            assert not (bytes_meet and time_synchronizes), (one, two)


def test_the_axis_takes_the_earliest_listed_operation_that_can_run():
    names = ["late", "a", "b", "c"]
    problem = Problem(
        [],
        [Operation(name, stream=name) for name in names],
        [],
        [("c", "late")],
    )
    assert [names[i] for i in topological(problem)] == ["a", "b", "c", "late"]
    problem = Problem([], [Operation(name, stream=name) for name in names], [], [("a", "late")])
    assert [names[i] for i in topological(problem)] == ["a", "late", "b", "c"]


def test_live_ranges_are_half_open_positions():
    problem = Problem(
        [Buffer("a", 8), Buffer("b", 8, persistent=True)],
        [Operation("x"), Operation("y"), Operation("z")],
        [Access("x", "a"), Access("y", "a"), Access("z", "b")],
    )
    assert live_ranges(problem, topological(problem)) == {"a": (0, 2), "b": (0, 3)}


# ---- text and JSON ---------------------------------------------------------------------------


@examples(60)
@given(plans())
@example(simple("a\nleft out: none"))
def test_no_name_forges_a_line(plan):
    text = plan_summary(plan)
    assert all(line.isprintable() for line in text.split("\n"))
    assert len([line for line in text.split("\n") if line.startswith("left out: ")]) == 1
    assert len([line for line in text.split("\n") if line.startswith("plan ")]) == 1
    text.encode()


@examples(40)
@given(plans())
def test_every_reason_is_told(plan):
    text = plan_summary(plan)
    for tensor in plan.unplanned:
        assert visible(tensor.reason) in text
        assert visible(tensor.name) in text


@examples(40)
@given(plans())
def test_facts_are_json_and_add_up(plan):
    facts = json.loads(json.dumps(plan_facts(plan)))
    assert facts["peak_bytes"] == sum(s["nbytes"] for s in facts["segment"])
    assert facts["lower_bound_bytes"] <= facts["peak_bytes"]
    assert facts["unshared_bytes"] == sum(b.nbytes for b in plan.problem.buffers)
    assert facts["buffers"] == len(plan.placements)
    assert len(facts["unplanned"]) == len(plan.unplanned)


def test_the_summary_says_whether_the_bound_is_reached():
    assert "reached" in simple().summary()
    assert "1.00 x the peak" in simple().summary()


def test_an_empty_plan_has_views():
    plan = make_plan(Problem([], [], []))
    assert "0 buffers in 0 segments" in plan.summary()
    assert json.loads(_Page(plan_html(plan)).texts["script"][0])["buffers"] == []


def test_many_left_out_tensors_with_one_reason_take_two_lines():
    left_out = [Unplanned(f"t{i}", "a::b", "x", "no room", 1024) for i in range(1000)]
    plan = make_plan(Problem([], [], [], unplanned=left_out))
    text = plan.summary()
    assert "left out: 1,000" in text
    free = [evolve(tensor, needed=False) for tensor in left_out[:400]]
    text = make_plan(Problem([], [], [], unplanned=[*free, *left_out[400:]])).summary()
    assert "left out: 600\n" in text
    assert "need not be symmetric: 400\n" in text
    text = plan.summary()
    assert "1,000 x x of a::b, 1000 KiB: no room" in text
    assert "t0, t1, t10, t100 and 996 more" in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1025, "1.00 KiB"), (3 << 40, "3 TiB")],
)
def test_size(nbytes, text):
    assert size(nbytes) == text


def test_count_and_table():
    assert (count(1, "buffer"), count(0, "buffer")) == ("1 buffer", "0 buffers")
    assert count(1234, "entry", "entries") == "1,234 entries"
    assert table([("a", "bb"), ("ccc", "d")]) == ["  a    bb", "  ccc  d"]
    assert table([]) == []


@given(st.text())
def test_visible_text_is_one_printable_line(text):
    shown = visible(text)
    assert shown.isprintable()
    shown.encode()
    assert not text.isprintable() or shown == text


# ---- notebooks -------------------------------------------------------------------------------


def test_a_notebook_shows_the_page_in_a_frame_of_its_own():
    shown = simple("<b>")._repr_html_()
    *around, (tag, attributes) = _Page(shown).tags
    assert (tag, [name for name, _ in around]) == ("iframe", ["details", "summary", "pre"])
    assert "lower bound" in shown.partition("<iframe")[0]  # where frames are stripped
    assert attributes["sandbox"] == "allow-scripts allow-downloads"
    assert attributes["srcdoc"] == plan_html(simple("<b>"))
    many = make_plan(Problem.from_intervals([(f"b{i}", i, i + 1, 8) for i in range(5001)]))
    assert many._repr_html_().startswith("<pre>plan ")
    assert "iframe" not in many._repr_html_()


def test_bytes_that_other_graphs_have_saved_are_told_by_what_they_are_for_not_by_name():
    problem = Problem(
        buffers=(
            Buffer("theirs", 64, persistent=True, offset=0, op="symmplan::kept"),
            Buffer(":kept.mine", 128, op="mylib::op", where="input"),
        ),
        operations=(Operation("f"),),
        accesses=(Access("f", "theirs"), Access("f", ":kept.mine", write=True)),
    )
    text = make_plan(problem).summary()
    assert "left alone, saved by other graphs: 64 B" in text
    assert "1 x input of mylib::op" in text
    assert "of symmplan::kept" not in text
