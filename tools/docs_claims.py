"""The verdicts of docs/claims.md, computed from the figures that its own snippets find.

The page's test runs the snippets, and with --update-golden writes the table anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.markdown import markdown

__all__ = ["with_verdicts"]

_TABLE = re.compile(r"^\| claim \| verdict \|\n(\|.*\n)+", re.MULTILINE)
_REPORTS = re.compile(r"^\| report \| reported \| .*\n(\|.*\n)+", re.MULTILINE)
_TIME_US = re.compile(r"^ +14000000000 .* sum +([\d.]+) ", re.MULTILINE)
_GPU_GB = 85.9


def with_verdicts(page: str, found: Mapping[str, Any]) -> str:
    """The page with its table made of `found`: names and values that the snippets leave."""
    rows = (*_network(found), *_options(found), *_sizes(found), *_collectives(page, found))
    verdicts = markdown(("claim", "verdict"), rows) + "\n"
    reports = markdown(("report", "reported", "here", "not given"), _sharding(found)) + "\n"
    return _REPORTS.sub(lambda _: reports, _TABLE.sub(lambda _: verdicts, page, count=1), count=1)


def _sharding(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    ddp, whole, third = found["olmo_tokens_per_s"]
    off = f"{100 * (third / 1790 - 1):+.0f} %"
    fitted = f"GPUs and links, fitted to two of three rows; the third is {off} off"
    yield "OLMo#762: DDP over FSDP, tokens/s", "4.6 x", f"{ddp / whole:.1f} x", fitted
    low, high = found["fairseq_longer"]
    longer = f"{low} to {high} x"
    yield "fairseq#4529: FSDP over DDP, a step", "3.6 x", longer, "model, GPUs, network"
    nvlink, pcie = found["kept_gain"]
    kept = f"{100 * (nvlink - 1):+.0f} to {100 * (pcie - 1):+.0f} %"
    yield "torchtune#2402: parameters kept, tokens/s", "+8 %", kept, "GPUs, batch"
    hsdp, fsdp, _ = found["experts_s"]
    gain = f"{fsdp / hsdp:.1f} x"
    yield "pith-train#40: HSDP over FSDP", "1.34 x", gain, "a pipeline, which is not modelled"
    one_nic, four_nics = (" / ".join(map(str, each)) for each in found["weather_left"])
    name, reported = "WeatherGenerator#1246: FSDP / HSDP / DDP", "0.933 / 0.945 / 0.95"
    yield f"{name}, 1 to 2 nodes", reported, one_nic, "model, GPUs, network"
    yield "the same with 4 NICs of 200 Gbit/s a node", "", four_nics, ""


def _network(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    gain, vgg, wide = found["resnet_gain"], found["vgg_gain"], found["wide_gain"]
    most = max(gain, vgg)  # the claim is of the largest gain
    held = f"{_said(1.25 <= most < 1.4)}: VGG-16 gets {vgg} x, ResNet-50 {gain} x"
    yield "overlap brings up to 1.3 x", f"{held}; with a NIC for each GPU {wide} x"


def _options(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    steps = [found["resnet_ms"], found["gpt2_ms"]]
    over_plain = max(plain / static - 1 for plain, _, static in steps)
    most = 100 * max(finding / static - 1 for _, finding, static in steps)
    what = f"what `find_unused_parameters` costs, {most:.0f} % at most here"
    yield "`static_graph` saves up to 10 %", f"{_said(over_plain > 0.01)}: it saves {what}"


def _sizes(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    resnet, bert, narrow = found["resnet"], found["bert"], found["narrow"]
    named = (("ResNet-50", resnet[0]), ("BERT-large", bert[0]))
    each = (f"{_said(min(some) >= 95)} for {name}, {_range(some)} %" for name, some in named)
    yield "95-99 % efficiency on 2-8 GPUs with NVLink", "; ".join(each)
    near, wired = [*resnet[1], *bert[1]], narrow[1:3]
    for_each = f"{_said(min(near) >= 85)} with a NIC for each GPU, {_range(near)} %"
    one = f"{_said(min(wired) >= 85)} with one a node, {_range(wired)} %"
    yield "85-95 % on 16-64 GPUs with InfiniBand", f"{for_each}; {one}"
    far = [*resnet[2], *bert[2]]
    is_low = ", and is low" if max(far) > 90 else ""
    far_said = f"{_said(min(far) >= 70)}{is_low}: {_range(far)} % with a NIC for each GPU"
    yield "70-90 % beyond 100 GPUs", far_said
    first, later, wide = narrow[0] - narrow[1], narrow[3] - narrow[4], bert[1][0] - bert[2][-1]
    wire = f"with one NIC a node 16 GPUs lose {first} % to 8, and 1024 lose {later} % to 128"
    hurts = f"{_said(later > first)}: {wire}; with a NIC for each GPU 1024 lose {wide} % to 16"
    yield "communication hurts beyond 64-128 GPUs", hurts
    at_512, at_1024, host = *bert[2][1:], 100 * found["host_share"]
    model = f"BERT-large, whose host needs {host:.0f} % of its device's time"
    limit = f"{_said(at_1024 < at_512 - 2)}: {model}, has {at_512} % there and {at_1024} % on 1024"
    yield "512 GPUs are the limit of hiding", limit
    families = (("GPT-2", found["gpt2_sizes"]), ("ResNets", found["resnet_sizes"]))
    by_size = (
        f"{_said(most[-1] > most[0])} for {name}, {most[0]} % to {most[-1]} %"
        for name, most in families
    )
    yield "larger models scale better", f"{'; '.join(by_size)}: work per parameter decides"


def _collectives(page: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    once, each_time = found["reduced_once"], found["reduced_each"]
    sent = f"{_said(once < each_time)} with `no_sync`, {once} buckets; without it {each_time}"
    yield "one reduction a step with accumulation", sent
    batches = zip((1, 4, 8, 16), found["whole_gb"], strict=True)
    most = max((batch for batch, needed_gb in batches if needed_gb < _GPU_GB), default=0)
    fits = f"GPT-2 XL, 1.56 B, fits with {most} sequences, not with {2 * most}"
    adam = f"parameters and Adam alone would allow {80 / 20:.0f} B"
    yield "about 2 B parameters fit 80 GB", f"{_said(most > 0)} with activations: {fits}; {adam}"
    view, buckets = found["hundred_tb"]
    held = f"{_said(view == 1.6)} with `gradient_as_bucket_view`; DDP's buckets make it {buckets}"
    yield "100 B parameters need 1.6 TB", f"{held}, without activations"
    times_s = [float(time_us) / 1e6 for time_us in _TIME_US.findall(page)]
    claims = (("100 Gbit/s take about 1.1 s", 1.1), ("400 Gbit/s take about 0.28 s", 0.28))
    for (claim, claimed_s), two_s, sixteen_s in zip(
        claims, times_s[::2], times_s[1::2], strict=True
    ):
        ranks = f"between two ranks, {two_s:.2f} s at NCCL's rate; 16 ranks take {sixteen_s:.2f} s"
        yield f"14 GB over {claim}", f"{_said(two_s < 1.15 * claimed_s)} {ranks}"
    inside, (wide, narrow) = found["inside_node"], found["second_node"]
    second = f"a second node with one NIC brings {wide} x at 100 Gbit/s, and {narrow} x at 10"
    gain = f"{_said(inside >= 1.9)} inside a node, {inside} x; {second}"
    yield "doubling the GPUs halves the time", gain
    later = found["later"]
    slow = (
        f"{_said(abs(later - 1.2) < 0.02)}: one rank 20 % slower makes all steps {later} x as long"
    )
    yield "the slowest rank sets the pace", slow


def _said(holds: bool) -> str:  # noqa: FBT001
    return "holds" if holds else "refuted"


def _range(figures: Sequence[int]) -> str:
    """ "94" or "89 to 94"."""
    low, high = min(figures), max(figures)
    return f"{low}" if low == high else f"{low} to {high}"
