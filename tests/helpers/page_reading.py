"""Storyboards that several tests draw, and their page, read as a browser would."""

from __future__ import annotations

import json
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ddpsim.planning.storyboard import storyboard
from ddpsim.result.storyboard import Storyboard

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios"
SLOW_NETWORK = SCENARIOS / "resnet50-2x8-25gbit.yaml"
EVIL = "</script><img src=x onerror=document.title=1>{{ 7*7 }} & <b>"


class Page(HTMLParser):
    """Tags with their attributes, and the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.title = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "title":
            self.title += data
        elif self._inside != "style":
            self.words += data

    @property
    def data(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} in JSON")

        return json.loads(self.scripts[0], parse_constant=refuse)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@cache
def board_storyboard() -> Storyboard:
    return storyboard(SLOW_NETWORK, [f"name={json.dumps(EVIL)}"])


@cache
def noisy_storyboard() -> Storyboard:
    few = ["workload.model=resnet18", "workload.step_time=165 ms"]
    few += ["run.iterations=3", "ddp.bucket_cap_mb=[2,7]"]
    return storyboard(SCENARIOS / "straggler.yaml", few)


@cache
def gloo_storyboard() -> Storyboard:
    return storyboard(SCENARIOS / "gloo-cpu.yaml")


@cache
def measured_storyboard() -> Storyboard:
    return storyboard(SCENARIOS / "resnet50-nccl-log.yaml")
