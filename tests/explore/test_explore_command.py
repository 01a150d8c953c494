"""`ddpsim explore` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome

from ddpsim.explore.server import Server

Command = Callable[..., Outcome]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """The servers that were started; each ends as by Ctrl-C."""
    found: list[Server] = []

    def serve(self: Server) -> None:
        found.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", serve)
    return found


def test_it_says_where_the_page_is(cli: Command, served: list[Server], tmp_path: Path) -> None:
    started = cli("explore", "--no-browser", "--port", "0", "--set", "cluster.nodes=4")
    (server,) = served
    assert started.out == f"scenario.yaml: open {server.address}\n"
    assert server.server_address[0] == "127.0.0.1"
    assert started.code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lesson", "overlaps"], "'overlaps' is none of overlap, buckets, no_sync, ring, "),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--set", "cluster.nodes"], "write --set key.path=value"),
    ],
)
def test_wrong_options_say_so(cli: Command, options: list[str], message: str) -> None:
    refused = cli("explore", "--no-browser", *options)
    assert refused.code == 2
    assert message in refused.err


def test_a_port_that_is_taken_is_said(cli: Command, served: list[Server], server: Server) -> None:
    port = str(server.server_address[1])
    refused = cli("explore", "--no-browser", "--port", port)
    assert refused.code == 2
    assert f"127.0.0.1:{port} cannot be served" in refused.err
    assert not served
