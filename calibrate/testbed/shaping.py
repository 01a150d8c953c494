"""How a rate becomes a token bucket (qdisc tbf); pure but for reading the kernel's timer.

A bucket of `burst` bytes fills at `rate`; a packet passes when its bytes are in the bucket.

What counts: whole Ethernet frames, without preamble and checksum. TCP's payload is 1448 of 1514
bytes at an MTU of 1500, so 1 Gbit/s carries 956 Mbit/s of payload. A veth hands packets on in
pieces of up to 64 KiB (GSO, TSO); the kernel counts such a piece with the headers of all its frames
(`qdisc_skb_cb.pkt_len`), so the rate holds with the offloads on and none is turned off. A bucket
smaller than such a piece would make tbf cut it up, and drop much of it at low rates: hence 128 KiB.

What we saw (Linux 6.18, HZ=250, high-resolution timers, 2 cores, one TCP stream):
- long transfers at 128 KiB: 95.2 to 96.2 % of the rate in payload at 0.1, 1, 2, 5 and 10 Gbit/s;
- 40 Gbit/s: 72 %, where the cores are the limit;
- one message of 4 MiB at 5 Gbit/s, where the rate allows 7.0 ms: 7.4 ms with 128 KiB, 6.5 ms with
  625 kB, 2.7 ms with rate / HZ = 2.5 MB. A large bucket makes a fast network, hence a small one.
"""

from __future__ import annotations

from pathlib import Path

from calibrate.testbed.errors import TestbedError

LATENCY_S = 0.020  # a packet waits no longer than this in the queue, else it is dropped
SMALLEST_BURST_BYTES = 131_072  # twice the largest packet that a veth hands on

# tbf keeps burst / rate in 32 bits of 64 ns (274 s), and rate x latency + burst in 32 bits of bytes
SLOWEST_BYTES_PER_S = 1e3
FASTEST_BYTES_PER_S = 200e9

# from a timer to its packet on an idle core, at worst; assumed, as 10 Gbit/s holds with 105 us
WAKE_UP_S = 100e-6
_PSCHED = Path("/proc/net/psched")


def check_rate(rate_bytes_per_s: float) -> None:
    """Raise TestbedError for a rate that tbf cannot hold, which is also any that is not finite."""
    if not SLOWEST_BYTES_PER_S <= rate_bytes_per_s <= FASTEST_BYTES_PER_S:
        raise TestbedError(
            f"a link of {rate_bytes_per_s * 8:g} bit/s cannot be shaped: "
            "choose a rate from 8 kbit/s to 1600 Gbit/s"
        )


def burst_bytes(rate_bytes_per_s: float, timer_hz: float) -> int:
    """Size of the bucket in bytes: what the link sends until the kernel's timer wakes it again.

    128 KiB at least. With high-resolution timers (`timer_hz` 1e9, on nearly every machine) the
    wake-up counts as 100 us: 128 KiB up to 10.5 Gbit/s, 500 kB at 40 Gbit/s. Without them it is a
    tick, so rate / HZ: 1 MB at 2 Gbit/s and HZ=250. No larger than needed, as what fits into a full
    bucket passes at the speed of memory.
    Source: tc-tbf(8), "burst"; ours is the wake-up time.
    """
    return max(SMALLEST_BURST_BYTES, round(rate_bytes_per_s * max(WAKE_UP_S, 1 / timer_hz)))


def tbf_arguments(rate_bytes_per_s: float) -> str:
    """What `tc qdisc add dev ... root` takes to shape a link; raises TestbedError (check_rate)."""
    check_rate(rate_bytes_per_s)
    burst = burst_bytes(rate_bytes_per_s, _timer_hz())
    return f"tbf rate {round(rate_bytes_per_s * 8)}bit burst {burst} latency {LATENCY_S * 1e3:g}ms"


def _timer_hz() -> float:
    """The packet scheduler's clock in Hz: HZ, or 1e9 with high-resolution timers.

    Source: Linux net/sched/sch_api.c, psched_show: the fourth number is 1e9 / hrtimer_resolution.
    """
    try:
        return float(int(_PSCHED.read_text("ascii").split()[3], 16)) or 100.0
    except (OSError, ValueError, IndexError):
        return 100.0  # the slowest tick that kernels are built with
