"""What twice the GPUs of a plan give, and the network that would make them worth while."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.report.lines import labelled
from ddpsim.result.capacity import KNEE_EFFICIENCY, NextDoubling
from ddpsim.units import format_bytes_per_s

_WORTH_SAYING = 0.1  # of the throughput
_LINKS = {"inter_node": "inter-node", "intra_node": "intra-node"}


def next_doubling_lines(found: NextDoubling | None) -> Iterator[str]:
    """What twice the GPUs give, and which network would make them worth while."""
    if found is None:
        return
    more = ""
    if found.samples_growth > 1:
        more = f", {found.samples_growth:.2f} times the samples counted"
    gives = (
        f"twice the GPUs ({found.gpus:,}) give {found.efficiency:.0%} of twice the throughput{more}"
    )
    if found.efficiency >= KNEE_EFFICIENCY:
        said = f"{gives}: worth it with this network"
    elif found.needed_speedup is None:
        said = f"{gives}; {_no_network(found)}"
    else:
        said = f"{gives}; {_needed(found)} would make it {found.needed_efficiency:.0%}"
        if found.gain_without_doubling:
            said += (
                f", and alone, without more GPUs, the throughput {found.gain_without_doubling:+.0%}"
            )
    yield from labelled("network", said)
    if found.gain_without_network_time >= _WORTH_SAYING:
        more = f"{found.gain_without_network_time:.0%} more throughput"
        yield from labelled("", f"if the network took no time, the answer's GPUs would have {more}")


def _needed(found: NextDoubling) -> str:
    speedup = found.needed_speedup or 1.0
    if found.needed_bandwidth_bytes_per_s is None or found.bandwidth_bytes_per_s is None:
        return f"all-reduces {speedup:.3g} x as fast as measured"
    rates = (found.needed_bandwidth_bytes_per_s, found.bandwidth_bytes_per_s)
    wanted, today = (_rate(found.link, rate) for rate in rates)
    return f"{_LINKS[found.link]} links of {wanted} instead of {today} ({speedup:.3g} x)"


def _rate(link: str, bytes_per_s: float) -> str:
    """Writes a rate the way such links are sold: a NIC by its bits, a bus by its bytes."""
    if link == "inter_node":
        return f"{bytes_per_s * 8 / 1e9:,.4g} Gbit/s a NIC"
    return format_bytes_per_s(bytes_per_s)


def _no_network(found: NextDoubling) -> str:
    free = f"{found.without_network_time:.0%}"
    if found.without_network_time < KNEE_EFFICIENCY:
        return (
            f"no network makes it worth while: one that takes no time at all gives {free}. Then "
            f"what bounds is {found.limit}"
        )
    if found.unlimited_efficiency is None:
        return f"a network that takes no time gives {free}"
    return (
        f"no {_LINKS[found.link]} bandwidth makes it worth while: an unlimited one gives "
        f"{found.unlimited_efficiency:.0%} (a network that takes no time {free}). Then what bounds "
        f"is {found.limit}"
    )
