"""The page of a plan in a browser: advice, the peak, filters, names, what differs in two plans."""

from __future__ import annotations

import functools

from attrs import evolve
from plan_page import Page, layered
from simulate_programs import Config, program

import symmplan
from symmplan import Plan, Problem
from symmplan.choose.choice import Choice
from symmplan.model import Access, Buffer, Operation, Placement, SegmentSpec, Unplanned
from symmplan.planner import plan as make_plan


def changed() -> tuple[Plan, Plan]:
    """Two plans: a buffer of the first is gone, one moved, one is larger, one is new."""
    one = Problem.from_intervals([("a", 0, 4, 4096), ("b", 0, 4, 4096), ("c", 0, 4, 4096)])
    two = Problem.from_intervals([("b", 0, 4, 4096), ("c", 0, 4, 8192), ("d", 0, 4, 512)])
    return (
        Plan(
            one,
            (SegmentSpec("s", ("default",), 12288, 12288),),
            {n: Placement("s", i * 4096, 4096) for i, n in enumerate("abc")},
        ),
        Plan(
            two,
            (SegmentSpec("s", ("default",), 20480, 12800),),
            {
                "b": Placement("s", 0, 4096),
                "c": Placement("s", 8192, 8192),
                "d": Placement("s", 16384, 512),
            },
        ),
    )


def test_two_plans_show_what_differs(browser, tmp_path):
    one, two = changed()
    with Page(browser, tmp_path, one, beside=two) as shown:
        page = shown.page
        told = page.locator("#tables").inner_text()
        assert (
            "1 moved, 1 resized, 1 new, 1 gone; the peak changes by +8 KiB (12 KiB → 20 KiB)"
            in told
        )
        table = page.locator("h2:has-text('Differences') + .scroll tbody tr")
        rows = {tuple(row.split("\t")) for row in table.all_inner_texts()}
        assert rows == {
            ("a", "gone", "[0, 4,096)", "none", "\N{MINUS SIGN}4 KiB"),
            ("b", "moved", "[4,096, 8,192)", "[0, 4,096)", "0 B"),
            ("c", "resized", "[8,192, 12,288)", "[8,192, 16,384)", "+4 KiB"),
            ("d", "new", "none", "[16,384, 16,896)", "+512 B"),
        }
        page.locator("#differ").click()
        assert page.locator("#differ").get_attribute("aria-pressed") == "true"
    with Page(browser, tmp_path, one) as shown:
        assert shown.page.locator("#differ").is_hidden()
        assert "Differences" not in shown.page.locator("#tables").inner_text()


def test_only_differences_keep_their_colour(browser, tmp_path):
    with Page(browser, tmp_path, layered(), beside=layered(3)) as shown:
        shown.page.locator("#differ").click()
        told = shown.page.locator("#tables").inner_text()
        assert "9 of 18 buffers" in told
        assert "0 of 9 buffers" in told


def test_the_peak_and_what_a_filter_found_are_shown(browser, tmp_path):
    sizes = [("early", 0, 3, 4096), ("late", 80, 90, 4096), ("top", 60, 70, 65536)]
    sizes += [(f"x{i}", i, i + 1, 64) for i in range(99)]
    plan = make_plan(Problem.from_intervals(sizes))
    with Page(browser, tmp_path, plan) as shown:
        page = shown.page
        page.keyboard.press("k")
        peak = shown.state
        assert peak["s"] * 99 < 70
        assert peak["t"] * 99 > 60
        assert peak["t"] - peak["s"] < 0.3
        page.locator("#reset").click()
        page.locator("#peak").click()
        assert shown.state["s"] == peak["s"]
        page.keyboard.press("/")
        page.keyboard.type("late")
        found = shown.state
        assert 0.75 < found["s"] <= 80 / 99
        assert 90 / 99 <= found["t"] < 0.95
        page.locator("#filter").fill("")
        assert (shown.state["s"], shown.state["t"]) == (0, 1)


def test_advice_and_what_it_saves_together(browser, tmp_path):
    buffers = [Buffer(name, 4096, persistent=name != "a") for name in "abc"]
    operations = [Operation(name) for name in "abc"]
    problem = Problem(buffers, operations, [Access(name, name) for name in "abc"])
    with Page(browser, tmp_path, make_plan(problem)) as shown:
        assert "could save\n8 KiB\n" in shown.page.locator("header").inner_text()
        told = shown.page.locator("#tables").inner_text()
        assert "What would save bytesup to 8 KiB of 12 KiB" in told
        assert "'c' is bound for the whole program" in told


def test_trades_and_measured_milliseconds_are_apart_from_savings(browser, tmp_path):
    run = functools.partial(program, Config("fsdp", 2, steps=2, widths=(1, 3, 2, 1)))
    (plan,) = symmplan.simulate(run, ranks=2, memory="shm").plans
    texts = [trade.text for trade in plan.trades()]
    assert texts
    choice = Choice("all_gather", 1 << 20, "float32", "g", 2, {"symmetric": 2e-3}, "symmetric")
    with Page(browser, tmp_path, plan, choices=[choice]) as shown:
        found = shown.page.locator("h2:has-text('can be traded') + .scroll").inner_text()
        assert all(text in found for text in texts)
        saving = shown.page.locator("h2:has-text('would save') + .scroll").inner_text()
        assert not any(text in saving for text in texts)
        assert "symmetric 2 ms" in shown.page.locator("#collectives").inner_text()


def test_buffers_are_called_as_in_the_program(browser, tmp_path):
    buffers = [Buffer("0008.5", 4096, label="layers.3.attention.wq"), Buffer("0009.5", 4096)]
    accesses = [Access("o", "0008.5"), Access("o", "0009.5")]
    with Page(browser, tmp_path, make_plan(Problem(buffers, [Operation("o")], accesses))) as shown:
        assert {"layers.3.attention.wq", "0009.5"} <= set(shown.svg())
        shown.page.keyboard.press("n")
        told = shown.page.locator("#pin").inner_text()
        assert "layers.3.attention.wq\n0008.5\n" in told
        shown.page.locator("#filter").fill("attention")
        assert "1 of 2 buffers" in shown.page.locator("#tables").inner_text()


def test_what_need_not_be_symmetric_is_apart(browser, tmp_path):
    left = [
        Unplanned("x", "a::b", "input", "it may lie anywhere", 4096, needed=False),
        Unplanned("y", "a::b", "return", "its size is not known", None),
    ]
    problem = evolve(Problem.from_intervals([("a", 0, 1, 64)]), unplanned=left)
    with Page(browser, tmp_path, make_plan(problem)) as shown:
        assert "left out\n1\n1 more need not be symmetric" in shown.page.inner_text("header")
        for title, reason in (("Left out", "not known"), ("Need not be", "anywhere")):
            row = shown.page.locator(f"h2:has-text('{title}') + .scroll tbody tr").all_inner_texts()
            assert len(row) == 1
            assert reason in row[0]
