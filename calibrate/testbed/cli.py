"""The testbed's commands. What only Linux has waits until a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ddpsim.cli import new_app, parsed
from ddpsim.units import format_bytes_per_s, parse_bytes_per_s

_HELP = """A real, bandwidth-limited network on this machine: Linux, root and iproute2.

\b
Examples
  testbed run --hosts 2 --rate 1Gbit/s -- python train.py      up, run on both hosts, down
  testbed run --hosts 3 --rate 1Gbit/s --rate-of 2=200Mbit/s -- python train.py
  testbed up --hosts 2 --rate 1Gbit/s                          stays until it is taken down
  testbed down
"""

DEFAULT_NAME = "testbed"

app = new_app(_HELP)

Hosts = Annotated[int, typer.Option(min=1, max=250, help="How many hosts.", show_default=False)]
Rate = Annotated[
    str,
    typer.Option(
        help='Rate of every link each way, "1 Gbit/s"; TCP carries 95.6 % of it.',
        show_default=False,
    ),
]
RateOf = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST=RATE", help="Another rate for one host, 1=200Mbit/s. Repeatable."),
]


@app.command(short_help="Build a testbed that stays until `down`.")
def up(
    hosts: Hosts,
    rate: Rate,
    rate_of: RateOf = None,
    name: Annotated[str, typer.Option(help="What to call it.")] = DEFAULT_NAME,
) -> None:
    """Build a testbed that stays until `down`, and print how to use its hosts.

    \b
    testbed up --hosts 2 --rate 1Gbit/s
    """
    from calibrate.testbed.bed import Testbed

    with Testbed(_rates(hosts, rate, rate_of or ()), name) as testbed:
        for host, rate_bytes_per_s in enumerate(testbed.rates_bytes_per_s):
            prefix = " ".join(testbed.host_prefix(host))
            shown = format_bytes_per_s(rate_bytes_per_s)
            print(f"h{host}  {testbed.address(host):<15}{shown:>12}  {prefix} COMMAND")
        testbed.keep()


@app.command(
    short_help="Build one, run a command on every host, take it down.",
    context_settings={"allow_interspersed_args": False},
)
def run(
    command: Annotated[list[str], typer.Argument(help="What to run on every host.")],
    hosts: Hosts,
    rate: Rate,
    rate_of: RateOf = None,
    name: Annotated[
        str | None, typer.Option(help="What to call it; made of the process's pid by default.")
    ] = None,
    cores: Annotated[
        str | None, typer.Option(help='Cores of each host: "0;1" or "0,1;2-3".')
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Stop everything after this.")
    ] = None,
) -> None:
    """Build a testbed, run a command on every host, and take it down whatever happens.

    The command finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
    GLOO_SOCKET_IFNAME and OMP_NUM_THREADS=1 set, as torch.distributed reads them, and no GPU. Ends
    with code 1 if a host fails.

    \b
    testbed run --hosts 2 --rate 1Gbit/s --cores "0;1" -- python train.py
    """
    from calibrate.testbed.bed import Testbed

    pinned = None if cores is None else parsed(_cores, cores, "--cores")
    with Testbed(_rates(hosts, rate, rate_of or ()), name, pinned) as testbed:
        testbed.run([command] * hosts, timeout_s=timeout, on_line=_print_line)


@app.command()
def down(
    name: Annotated[str, typer.Option(help="Which one.")] = DEFAULT_NAME,
    *,
    kill: Annotated[bool, typer.Option("--kill", help="End what still runs in it.")] = False,
) -> None:
    """Remove a testbed that `up` built, and nothing else.

    \b
    testbed down --name lab
    """
    from calibrate.testbed.network import take_down

    take_down(name, kill=kill)
    print(f"removed {name}")


@app.command("list", short_help="List the testbeds; remove those of dead processes.")
def list_() -> None:
    """List the machine's testbeds, and remove those whose process is gone.

    \b
    testbed list
    """
    from calibrate.testbed.network import present

    states = present()
    for state in states:
        rates = dict.fromkeys(format_bytes_per_s(rate) for rate in state.rates_bytes_per_s)
        whose = "up" if state.owner is None else f"process {state.owner.pid}"
        hosts = f"{len(state)} host{'s' * (len(state) > 1)}"
        print(f"{state.name}: {hosts}, {' and '.join(rates)}, {whose}")
    if not states:
        print("no testbed is up")


def _print_line(host: int, stream: str, line: str) -> None:
    """One write a line, as the hosts' lines come at once."""
    out = sys.stdout if stream == "stdout" else sys.stderr
    out.write(f"[h{host}] {line.rstrip()}\n")
    out.flush()


def _rates(hosts: int, rate: str, rate_of: Sequence[str]) -> list[float]:
    rates = [parsed(parse_bytes_per_s, rate, "--rate")] * hosts
    for text in rate_of:
        host, host_rate = parsed(_host_and_rate, text, "--rate-of")
        if host >= hosts:
            raise typer.BadParameter(
                f"{text!r}: there is no host {host}, choose 0 to {hosts - 1}",
                param_hint="--rate-of",
            )
        rates[host] = host_rate
    return rates


def _host_and_rate(text: str) -> tuple[int, float]:
    host, equals, rate = text.partition("=")
    if not equals or not host.strip().isdecimal():
        raise ValueError(f"{text!r} is not HOST=RATE, such as 1=200Mbit/s")
    return int(host), parse_bytes_per_s(rate)


def _cores(text: str) -> list[set[int]]:
    """Cores by host of `"0,1;2-3"`."""
    try:
        return [
            {core for part in host.split(",") for core in _span(part)} for host in text.split(";")
        ]
    except ValueError:
        raise ValueError(
            f"{text!r} is no list of cores by host: separate hosts by ; and cores by , as in '0;1'"
        ) from None


def _span(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
