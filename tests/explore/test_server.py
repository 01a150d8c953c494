"""The server lets nobody else in, and ends what takes too long."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

from ddpsim.explore.answer import Given
from ddpsim.explore.server import Server
from ddpsim.explore.worker import Worker

START = json.dumps({"part": "start"})


def asked(
    server: Server,
    method: str = "POST",
    path: str = "/answer",
    body: str = START,
    **headers: str | None,
) -> tuple[int, dict[str, str], str]:
    """Status, headers and content; a header that is None is not sent."""
    host, port = server.server_address[:2]
    sent = {"X-Ddpsim-Token": server.token, "Host": f"{host}:{port}", "Origin": server.url[:-1]}
    named: dict[str, Any] = sent | {key.replace("_", "-"): each for key, each in headers.items()}
    connection = HTTPConnection(str(host), int(port), timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        for key, value in {"Content-Length": str(len(body)), **named}.items():
            if value is not None:
                connection.putheader(key, value)
        connection.endheaders(body.encode())
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read().decode()
    finally:
        connection.close()


def test_the_page_and_its_answers(server: Server) -> None:
    status, headers, page = asked(server, "GET", "/", "")
    assert status == 200
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "ResNet" not in page  # nor anything else of a scenario
    policy = page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; ")
    assert "connect-src 'self'; worker-src 'none'; script-src 'sha256-" in policy
    status, headers, content = asked(server)
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert json.loads(content)["name"] == "scenario.yaml"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X_Ddpsim_Token": None}, 401),
        ({"X_Ddpsim_Token": "x" * 32}, 401),
        ({"X_Ddpsim_Token": "é"}, 401),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "elsewhere.example"}, 403),
        ({"Host": None}, 403),
        ({"Content_Length": "600000"}, 413),
        ({"Content_Length": "-1"}, 413),
        ({"body": "{"}, 400),
        ({"body": "[]"}, 400),
        ({"path": "/etc/passwd"}, 400),
        ({"method": "GET", "path": "/../../etc/passwd"}, 404),
        ({"method": "GET", "path": "/", "Host": "127.0.0.1"}, 403),
        ({"method": "PUT"}, 501),
    ],
)
def test_whoever_else_asks_is_refused(server: Server, headers: dict[str, Any], status: int) -> None:
    found, _, content = asked(server, **headers)
    assert found == status
    assert "resnet50" not in content


def test_two_tabs_have_an_answer_each(server: Server, given: Given) -> None:
    def step(cap: int) -> str:
        settings = [f"ddp.bucket_cap_mb={cap}"]
        question = {"part": "step", "text": given.text, "settings": settings}
        status, _, content = asked(server, body=json.dumps(question))
        assert status == 200
        return str(json.loads(content)["inputs"]["ddp.bucket_cap_mb"])

    caps = [1, 25] * 4
    with ThreadPoolExecutor(2) as tabs:
        assert list(tabs.map(step, caps)) == [str(cap) for cap in caps]


def test_what_takes_too_long_is_ended(given: Given) -> None:
    worker = Worker(given, 0.001)
    try:
        question = {"part": "step", "text": given.text, "settings": ["ddp.accumulation_steps=500"]}
        (problem,) = worker.ask(question)["problems"]
        assert "takes longer than the 0.001 s of this page" in problem["message"]
        worker._limit_s = 60
        assert worker._running
        worker._running[1].kill()
        (problem,) = worker.ask({"part": "start"})["problems"]
        assert "ended the process" in problem["message"]
        assert worker.ask({"part": "start"})["name"] == "scenario.yaml"
    finally:
        worker.close()
