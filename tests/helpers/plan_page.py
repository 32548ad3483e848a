"""The page of a plan in a headless browser, and a plan that has something to show."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

from symmplan import Plan, Problem
from symmplan.model import Access, Buffer, Operation
from symmplan.planner import plan as make_plan


class Page:
    """A plan's page, and what the tests ask of it."""

    def __init__(self, browser, tmp_path, plan: Plan, scheme: str = "light", **more) -> None:
        path = tmp_path / "plan.html"
        plan.to_html(path, **more)
        self.page = browser.new_page(
            color_scheme=scheme, viewport={"width": 1200, "height": 900}, accept_downloads=True
        )
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.body.dataset.frames")
        box = self.page.locator(".over").first.bounding_box()
        self.left, self.top = box["x"] + 96, box["y"] + 6
        self.width, self.height = box["width"] - 96 - 18, 290

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.page.close()
        assert not self.errors

    @property
    def state(self) -> dict:
        """The page's view, once it is painted."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return json.loads(self.page.evaluate("document.body.dataset.frames"))

    def spot(self, time: float, share: float) -> tuple[float, float]:
        """Where a part of the time and of the bytes is on the screen, of the whole picture."""
        return self.left + time * self.width, self.top + (1 - share) * self.height

    def svg(self, at_least: float = -99) -> list[str]:
        """What the texts of the picture are when it is saved, those so many pixels down."""
        with self.page.expect_download() as given:
            self.page.locator(".save").first.click()
        root = ET.fromstring(given.value.path().read_text(encoding="utf-8"))
        texts = [e for e in root.iter() if e.tag.endswith("}text")]
        return [e.text or "" for e in texts if float(e.get("y", "0")) >= at_least]


def layered(layers: int = 6) -> Plan:
    """Layers whose names have begin and end in common, on two streams that wait for each other."""
    operations, accesses, buffers, edges = [], [], [], []
    for i in range(3 * layers):
        kind = ("gather", "reduce", "scatter")[i % 3]
        name = f"layers.{i // 3}.{kind}"
        stack = (f"train.py:{i} in main", f"model.py:{i} in forward")
        stream = "comm" if i % 2 else "main"
        operations.append(Operation(name, stream=stream, op=f"lib::{kind}", stack=stack))
        edges += [(operations[-2].name, name)] if i else []
        buffers.append(Buffer(f"model.{name}.weight", (1 + i % 4) << 20, op=f"lib::{kind}"))
        accesses.append(Access(name, buffers[-1].name, write=True))
        accesses += [Access(operations[-2].name, buffers[-1].name)] if i % 3 else []
    return make_plan(Problem(buffers, operations, accesses, edges))
