"""The page of a plan in a browser: what it shows, and how it answers to pointer and keys."""

from __future__ import annotations

import re
import statistics
from itertools import combinations

import pytest
from plan_page import Page, layered

from symmplan import Plan, Problem
from symmplan.model import Access, Buffer, Operation, Placement, SegmentSpec
from symmplan.planner import plan as make_plan
from symmplan.simulation.report import Collective, Ordinary, SimulationReport

#: Milliseconds that a frame may take the page's own thread.
FRAME = 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_pinned_buffer_tells_all(browser, tmp_path, scheme):
    plan = layered()
    with Page(browser, tmp_path, plan, scheme) as shown:
        page = shown.page
        page.keyboard.press("n")
        page.keyboard.press("n")
        told = page.locator("#pin").inner_text()
        name = told.splitlines()[1]
        place = plan.placements[name]
        assert f"[{place.offset:,}, {place.end:,})" in told
        assert re.search(r"model\.py:\d+ in forward\ntrain\.py:\d+ in main", told)
        overlapping = [
            n
            for n, p in plan.placements.items()
            if n != name and p.offset < place.end and place.offset < p.end
        ]
        assert f"shares bytes with {len(overlapping)}\n" in told
        assert all(other in told for other in overlapping)
        assert told.count("is the last to use") == len(overlapping)
        assert "comes later on stream" in told or "waits for it, over " in told
        page.locator("#pin li button").first.click()
        assert page.locator("#pin b").inner_text() in overlapping
        page.keyboard.press("Escape")
        assert page.locator("#pin").is_hidden()


def test_wheel_drag_box_and_keys(browser, tmp_path):
    with Page(browser, tmp_path, layered()) as shown:
        page, mouse = shown.page, shown.page.mouse
        whole = shown.state
        assert (whole["s"], whole["t"]) == (0, 1)
        x, y = shown.spot(0.25, 0.5)
        mouse.move(x, y)
        mouse.wheel(0, -300)
        near = shown.state
        assert near["t"] - near["s"] < 0.7
        at = (x - shown.left) / shown.width
        assert near["s"] + at * (near["t"] - near["s"]) == pytest.approx(at, abs=0.01)
        mouse.down()
        mouse.move(x - 50, y, steps=3)
        mouse.up()
        moved = shown.state
        by = 50 / shown.width * (near["t"] - near["s"])
        assert moved["s"] - near["s"] == pytest.approx(by, rel=0.02)
        mouse.dblclick(x, y)
        assert (shown.state["s"], shown.state["t"]) == (0, 1)
        page.keyboard.down("Shift")
        mouse.move(*shown.spot(0.5, 0.9))
        mouse.down()
        mouse.move(*shown.spot(0.75, 0.1), steps=3)
        mouse.up()
        page.keyboard.up("Shift")
        box = shown.state
        assert (box["s"], box["t"]) == (pytest.approx(0.5, abs=0.01), pytest.approx(0.75, abs=0.01))
        page.keyboard.press("ArrowRight")
        assert shown.state["s"] > box["s"]
        page.keyboard.press("0")
        page.keyboard.press("+")
        assert shown.state["t"] - shown.state["s"] == pytest.approx(0.7)
        page.locator(".map").click(position={"x": 96 + 0.9 * shown.width, "y": 10})
        assert shown.state["t"] == pytest.approx(1)
        page.keyboard.press("?")
        assert "whole picture" in page.locator("#keys").inner_text()
        page.keyboard.press("/")
        page.keyboard.type("nothing like it")
        assert "0 of 18 buffers" in page.locator("#tables").inner_text()


def test_the_axis_is_the_users(browser, tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("id,lower,upper,size\ngrads.0,1,7,4096\ngrads.1,7,10,4096\nx,100,107,4096\n")
    with Page(browser, tmp_path, make_plan(Problem.from_csv(path))) as shown:
        shown.page.mouse.move(*shown.spot((8 - 1) / (107 - 1), 0.5))
        tip = shown.page.locator("#tip").inner_text()
        assert tip.startswith("grads.1\n")
        assert "live [7, 10)" in tip
        texts = shown.svg()
        assert "time of the problem" in texts
        assert "bytes of the segment" in texts
        assert {"20", "100"} <= set(texts)


def test_labels_keep_what_tells_names_apart(browser, tmp_path):
    with Page(browser, tmp_path, layered(3)) as shown:
        labels = {text for text in shown.svg() if re.search(r"gather|reduce|scatter", text)}
        assert any(
            re.fullmatch(r"\d+\.(gather|reduce|scatter)\.weight", text) for text in labels
        ), labels


def test_a_bound_close_to_the_peak_is_named_inside_the_picture(browser, tmp_path):
    problem = Problem.from_intervals([("a", 0, 1, 1 << 20)])
    spec = SegmentSpec("s", ("default",), (1 << 20) + 512, 1 << 20)
    plan = Plan(problem, (spec,), {"a": Placement("s", 0, 1 << 20)})
    with Page(browser, tmp_path, plan) as shown:
        assert "lower bound" in shown.svg(at_least=10)


def test_two_plans_are_side_by_side(browser, tmp_path):
    with Page(browser, tmp_path, layered(), beside=layered(3)) as shown:
        one, two = (shown.page.locator(".frame").nth(i).bounding_box() for i in (0, 2))
        assert one["y"] == two["y"]
        assert one["x"] + one["width"] < two["x"]
        assert shown.page.locator("section").count() == 2
        assert shown.page.locator(".which").all_inner_texts()[1].startswith("Beside ")


def of_ops(*ops: str) -> Plan:
    return make_plan(
        Problem(
            [Buffer(f"{op}.x", 4096, op=op) for op in ops],
            [Operation(op, op=op) for op in ops],
            [Access(op, f"{op}.x") for op in ops],
        )
    )


def test_an_op_has_one_colour_in_both_plans(browser, tmp_path):
    with Page(browser, tmp_path, of_ops("b", "c"), beside=of_ops("a", "b", "c")) as shown:
        marks = "[...document.querySelectorAll('#legend button')].map((b) => b.innerText)"
        assert shown.page.evaluate(marks) == ["b", "c", "a"]
        rows = shown.page.evaluate(
            "[...document.querySelectorAll('h2')]"
            ".filter((h) => h.innerText.startsWith('Placements'))"
            ".flatMap((h) => [...h.nextElementSibling.querySelectorAll('tbody tr')]).map((r) => "
            "[r.innerText.split(/\\s/)[0], r.querySelector('i').style.background])"
        )
        assert len(rows) == 5
        assert len(set(map(tuple, rows))) == 3, rows
        assert {"b", "c"} <= set(shown.svg())


def test_a_narrow_window_shows_all(browser, tmp_path):
    with Page(browser, tmp_path, layered(), beside=layered(3)) as shown:
        shown.page.set_viewport_size({"width": 390, "height": 844})
        one, two = (shown.page.locator(".frame").nth(i).bounding_box() for i in (0, 2))
        assert one["x"] == two["x"]
        assert one["width"] > 300
        assert shown.page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("at", [0.1, 0.9])
def test_the_pinned_panel_leaves_its_buffer_visible(browser, tmp_path, at):
    plan = make_plan(Problem.from_intervals([(f"b{i}", i, i + 1, 4096) for i in range(10)]))
    with Page(browser, tmp_path, plan) as shown:
        x, y = shown.spot(at, 0.5)
        shown.page.mouse.click(x, y)
        box = shown.page.locator("#pin").bounding_box()
        assert not box["x"] <= x < box["x"] + box["width"]


def test_a_notebook_shows_and_saves_the_picture(browser):
    page = browser.new_page(accept_downloads=True)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(f"<details id=x>{layered()._repr_html_()}</details>")  # not shown at first
    page.locator("#x").evaluate("(node) => { node.open = true; }")
    frame = page.frames[1]
    frame.wait_for_function("document.body.dataset.frames")
    with page.expect_download() as given:
        frame.locator(".save").click()
    assert given.value.suggested_filename.endswith("-segment0.svg")
    page.close()
    assert not errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_simulation_shows_its_plans(browser, scheme):
    ordinary = Ordinary(1, 2, 3, 4)
    done = Collective("<b>", 3, 4096, "0", 2, "ordinary")
    report = SimulationReport(2, 0, "shm", (layered(),) * 2, 1, 1, ordinary, 9, (done,))
    page = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 3000})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text))
    page.set_content(report.to_html())
    assert page.locator("td").nth(1).inner_text() == "<b>"
    for frame in page.frames[1:]:
        frame.wait_for_function("document.body.dataset.frames")
        assert frame.locator("canvas").count() == 5
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]
    page.close()
    assert not errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_thirty_six_ops_have_colours_of_their_own(browser, tmp_path, scheme):
    names = [f"b{i}" for i in range(40)]
    problem = Problem(
        [Buffer(name, 4096, op=f"lib::{name}") for name in names],
        [Operation("all")],
        [Access("all", name) for name in names],
    )
    with Page(browser, tmp_path, make_plan(problem), scheme) as shown:
        found = shown.page.evaluate(
            "[...document.querySelectorAll('#legend i')].map((i) => i.style.background)"
        )
        colours = [tuple(map(float, re.findall(r"[\d.]+", colour)[:3])) for colour in found[:36]]
        apart = min(
            sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) ** 0.5
            for x, y in combinations(colours, 2)
        )
        assert apart > 15
        hatched = shown.page.locator("#legend i.hatched").count()
        assert hatched == 4


def test_hostile_names_stay_text(browser, tmp_path):
    name = "</script><img src=x onerror=alert(1)>&\"'\x00]]>\u2028"
    problem = Problem(
        [Buffer(name, 512, op=name)],
        [Operation(name, op=name, stream=name, stack=(f"{name}:1 in {name}",))],
        [Access(name, name)],
    )
    with Page(browser, tmp_path, make_plan(problem)) as shown:
        shown.page.keyboard.press("n")
        assert "<img" in shown.page.locator("#pin").inner_text()
        assert shown.page.locator("img").count() == 0
        assert any("<img" in text for text in shown.svg())


def _large(count: int = 50_000) -> Plan:
    """Placed by hand, a row for each of 64 buffers at a time."""
    rows, size = 64, 65_536
    problem = Problem.from_intervals(
        [(f"layers.{i // 6}.w{i % 6}", i, i + 1 + i * 7 % rows, size) for i in range(count)]
    )
    places = {b.name: Placement("s", i % rows * size, size) for i, b in enumerate(problem.buffers)}
    return Plan(problem, (SegmentSpec("s", ("default",), rows * size, rows * size),), places)


@pytest.mark.further
def test_fifty_thousand_buffers_take_less_than_a_tenth_of_a_second(browser, tmp_path):
    """Of the page's own thread, so that it does not matter what else the machine does."""
    with Page(browser, tmp_path, _large()) as shown:
        assert any("50,000 buffers: the shade is" in text for text in shown.svg())
        assert "not computed for so many buffers" in shown.page.locator("#tables").inner_text()
        page, mouse = shown.page, shown.page.mouse
        session = page.context.new_cdp_session(page)
        session.send("Performance.setTimeDomain", {"timeDomain": "threadTicks"})
        session.send("Performance.enable")

        def busy() -> float:
            found = session.send("Performance.getMetrics")["metrics"]
            return 1000 * next(m["value"] for m in found if m["name"] == "TaskDuration")

        def frames(act, times: int = 11) -> float:
            """Milliseconds for each frame, the median."""
            found = []
            for i in range(times):
                count, begin = shown.state["count"], busy()
                act(i)
                assert shown.state["count"] > count
                found.append(busy() - begin)
            return statistics.median(found)

        x, y = shown.spot(0.5, 0.5)
        mouse.move(x, y)
        spent = {"wheel": frames(lambda i: mouse.wheel(0, -40 if i % 2 else 40))}
        mouse.wheel(0, -60)
        mouse.down()
        spent["drag"] = frames(lambda i: mouse.move(x - 9 * i - 9, y))
        mouse.up()
        spent["pin"] = frames(lambda i: mouse.click(x - 20 * i, y))
        spent["key"] = frames(lambda _: page.keyboard.press("n"))
        assert max(spent.values()) < FRAME, spent
