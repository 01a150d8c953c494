"""How many GPUs, on one screen: the answer, its network, the sizes, what was held, what next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from ddpsim.report.capacity.long_run import energy_lines, failure_lines, source_lines
from ddpsim.report.lines import as_text, command, cut, labelled, listed, screen_width, warned
from ddpsim.report.training import samples_lines, steps_in_words
from ddpsim.result.capacity import (
    KNEE_EFFICIENCY,
    Capacity,
    CapacityPlan,
    Money,
    NextDoubling,
    Target,
    usable,
)
from ddpsim.units import (
    format_bytes,
    format_bytes_per_s,
    format_duration,
    format_long_duration,
    format_number,
    long_duration_in,
)
from ddpsim.wording import counted

_MORE_THAN_TWICE = 1.01
_WHOLE_TABLE = 100  # columns
_WORTH_SAYING = 0.1  # of the throughput
_LINKS = {"inter_node": "inter-node", "intra_node": "intra-node"}


@as_text
def render_plan(plan: CapacityPlan, file: str, settings: Sequence[str] = ()) -> list[str]:
    """The plan as text of at most 100 columns; `file` and `settings` as the user gave them."""
    return [
        f"{cut(plan.name, 50)}   {_work(plan.target)}",
        "",
        *_answer(plan),
        *failure_lines(plan.answer.long_run),
        *energy_lines(plan.answer),
        *_next_doubling(plan.next_doubling),
        *_knee(plan),
        "",
        *_table(plan),
        "",
        *_trust(plan),
        *labelled("next", "what bounds the step there, and what would ease it"),
        *command(file, settings, sized(plan)),
    ]


def _work(target: Target) -> str:
    epochs = "" if target.epochs == 1 else f"{target.epochs:,} epochs of "
    within = ""
    if target.within_s is not None:
        number, unit = format_long_duration(target.within_s).split()
        sure = f" with {target.certainty:.0%} certainty" if target.certainty else ""
        within = f" in {float(number.replace(',', '')):g} {unit}{sure}"
    return f"{epochs}{_count(target.amount)} {target.unit}{within}"


def _count(number: int) -> str:
    """Writes a number in full, or with a suffix that loses nothing: `1,281,167`, `1.28M`."""
    for suffix, factor in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor and number % (factor // 100) == 0:
            return f"{number / factor:,.10g}{suffix}"
    return f"{number:,}"


def size_in_words(size: Capacity) -> str:
    """`48 GPUs (6 x 8)`."""
    return f"{counted(size.gpus, 'GPU')} ({size.nodes:,} x {size.gpus_per_node})"


def _costs(plan: CapacityPlan, size: Capacity) -> str:
    """`21.3 h, 511 GPU-hours, 1,278 USD`."""
    hours, cost = size.billed
    costs = f"{format_long_duration(size.calendar_s[0])}, {format_number(hours)} GPU-hours"
    if cost is None or not plan.price:
        return costs
    return f"{costs}, {format_number(cost)} {plan.price.currency}"


def _cost_edges(plan: CapacityPlan) -> str:
    """What the time at its edges costs: `, 95.2 to 145 USD`."""
    edges = plan.answer.cost_interval
    if edges is None or not plan.price:
        return ""
    low, high = map(format_number, edges)
    return f", {low} to {high} {plan.price.currency}"


def limit_in_words(limit: Money) -> str:
    """`5,000 USD`."""
    return f"{limit.amount:,.10g} {limit.currency}"


def _answer(plan: CapacityPlan) -> Iterator[str]:
    answer = plan.answer
    label = {True: "answer", False: "not met", None: "at the knee"}[plan.met]
    if plan.asked_gpus is not None:
        label = "answer"
    elif plan.met is None and plan.knee_gpus != answer.gpus:
        label = "largest"
    interval, edges_s = "no interval can be had", answer.calendar_s[1]
    if edges_s and plan.interval_level:
        low, high = map(format_long_duration, edges_s)
        what = "8 of 10 runs take" if answer.long_run else f"{plan.interval_level:.0%} interval"
        interval = f"{what} {low} to {high}{_cost_edges(plan)}"
    yield from labelled(label, f"{size_in_words(answer)}: {_costs(plan, answer)}")
    yield from labelled("", interval)
    no_room = "no size that was tried fits in memory: times are those of GPUs with more of it"
    yield from labelled("", no_room if answer.fits is False else _why(plan))
    yield from labelled("bounded by", answer.bottleneck)
    yield from warned(answer.warnings)
    others = [size for size in plan.sizes if set(size.warnings) - set(answer.warnings)]
    if others:
        number = f"{len(others)} other size{'s have' if len(others) > 1 else ' has'} warnings"
        first = f"{others[0].nodes} x {others[0].gpus_per_node}: {others[0].warnings[-1]}"
        yield from labelled("WARNING", f"{number}; of {first}")
    if answer.fits is False:
        needed = f"needs about {format_bytes(answer.memory_bytes)} a GPU"
        yield from labelled("WARNING", f"no size fits in memory ({needed}): {_mend(plan)}")
    if answer.global_batch > plan.samples_per_epoch:
        yield from labelled(
            "WARNING",
            f"the global batch of {answer.global_batch:,} is more than the epoch's "
            f"{plan.samples_per_epoch:,} samples",
        )


def _mend(plan: CapacityPlan) -> str:
    if plan.make_it_fit:
        settings = " ".join(f"--set {setting}" for setting in plan.make_it_fit.settings)
        return f"{plan.make_it_fit.why} ({settings})"
    return "take a device with more memory, a smaller batch or another optimizer"


def _why(plan: CapacityPlan) -> str:
    """How the answer was chosen, and how safe it is."""
    target, budget, answer = plan.target, plan.budget, plan.answer
    if plan.met is None:
        compared = "where the strategies are compared; a deadline or --budget chooses another size"
        unlimited = "neither a deadline nor a budget was given (--target '... in 24 h', --budget)"
        return compared if plan.asked_gpus else unlimited
    if plan.met and target.within_s is None:
        return f"the fastest of those that cost at most {limit_in_words(budget)}" if budget else ""
    if plan.met:
        return f"{_fewest(plan)}; {_safety(plan)}"
    if target.within_s is not None and answer.expected_s <= target.within_s and budget:
        other, instead = plan.within_budget, "nothing costs so little"
        if other:
            instead = f"the fastest for it: {size_in_words(other)}, {_costs(plan, other)}"
        return f"in time, but it costs more than {limit_in_words(budget)}; {instead}"
    if target.within_s is None and budget:
        return f"no size costs at most {limit_in_words(budget)}; this one costs least"
    kept = f" for {limit_in_words(budget)}" if budget else ""
    most = (
        f"no size up to {plan.most_gpus:,} GPUs that was tried meets the target{kept}; this one is "
        "the fastest"
    )
    ideal = format_long_duration(answer.time_s * answer.scaling_efficiency)
    more = (
        f", {'and ' if budget else ''}--max-gpus tries more"
        if answer.gpus == plan.sizes[-1].gpus
        else ""
    )
    if plan.left_out:
        more = "; others were left out, see below"
    return f"{most} (at 100 % efficiency it would take {ideal}){more}"


def _fewest(plan: CapacityPlan) -> str:
    answer = plan.answer
    smaller = [size for size in plan.sizes if size.gpus < answer.gpus]
    fitting = " of those that fit in memory" if any(s.fits is False for s in smaller) else ""
    if answer.gpus_per_node < plan.sizes[-1].gpus_per_node:
        return f"the fewest GPUs of one node, in powers of two, that are in time{fitting}"
    return f"the fewest nodes that are in time{fitting}"


def _safety(plan: CapacityPlan) -> str:
    if plan.answer.long_run:
        return f"{plan.target.certainty or 0.5:.0%} of the simulated runs are"
    if plan.answer.time_interval_s is None:
        return "how safely is unknown, without an interval"
    if plan.sure is None:
        return "no size is in time at the slow edge of its interval"
    if plan.sure.gpus <= plan.answer.gpus:
        return "at the slow edge of the interval too"
    sure = size_in_words(plan.sure)
    return f"at the slow edge of the interval the fewest in the table are {sure}"


def _knee(plan: CapacityPlan) -> Iterator[str]:
    meaning = f"{KNEE_EFFICIENCY:.0%} of twice the throughput"
    if plan.knee_gpus is None:
        gpus = {size.gpus for size in usable(plan.sizes)}
        doublings = [number for number in gpus if number % 2 == 0 and number // 2 in gpus]
        fitting = "" if len(gpus) == len(plan.sizes) else " and fit in memory"
        if not doublings:
            unknown = f"not known: no size and its double were both tried{fitting}"
            yield from labelled("knee", unknown)
            return
        last = counted(max(doublings), "GPU")
        text = f"none up to {last}: all doublings that were tried{fitting} give at least {meaning}"
        yield from labelled("knee", text)
        return
    doubled = next(size for size in plan.sizes if size.gpus == 2 * plan.knee_gpus)
    text = (
        f"{counted(plan.knee_gpus, 'GPU')}: the doubling to {doubled.gpus:,} is the first to give "
        f"less than {meaning} ({doubled.marginal_efficiency:.0%})"
    )
    yield from labelled("knee", text)


def _next_doubling(twice: NextDoubling | None) -> Iterator[str]:
    """What twice the GPUs give, and which network would make them worth while."""
    if twice is None:
        return
    more = ""
    if twice.samples_growth > 1:
        more = f", {twice.samples_growth:.2f} times the samples counted"
    gives = (
        f"twice the GPUs ({twice.gpus:,}) give {twice.efficiency:.0%} of twice the throughput{more}"
    )
    if twice.efficiency >= KNEE_EFFICIENCY:
        text = f"{gives}: worth it with this network"
    elif twice.needed_speedup is None:
        text = f"{gives}; {_no_network(twice)}"
    else:
        text = f"{gives}; {_needed(twice)} would make it {twice.needed_efficiency:.0%}"
        if twice.gain_without_doubling:
            text += (
                f", and alone, without more GPUs, the throughput {twice.gain_without_doubling:+.0%}"
            )
    yield from labelled("network", text)
    if twice.gain_without_network_time >= _WORTH_SAYING:
        more = f"{twice.gain_without_network_time:.0%} more throughput"
        yield from labelled("", f"if the network took no time, the answer's GPUs would have {more}")


def _needed(twice: NextDoubling) -> str:
    speedup = twice.needed_speedup or 1.0
    if twice.needed_bandwidth_bytes_per_s is None or twice.bandwidth_bytes_per_s is None:
        return f"all-reduces {speedup:.3g} x as fast as measured"
    rates = (twice.needed_bandwidth_bytes_per_s, twice.bandwidth_bytes_per_s)
    wanted, today = (_rate(twice.link, rate) for rate in rates)
    return f"{_LINKS[twice.link]} links of {wanted} instead of {today} ({speedup:.3g} x)"


def _rate(link: str, bytes_per_s: float) -> str:
    """Writes a rate the way such links are sold: a NIC by its bits, a bus by its bytes."""
    if link == "inter_node":
        return f"{bytes_per_s * 8 / 1e9:,.4g} Gbit/s a NIC"
    return format_bytes_per_s(bytes_per_s)


def _no_network(twice: NextDoubling) -> str:
    free = f"{twice.without_network_time:.0%}"
    if twice.without_network_time < KNEE_EFFICIENCY:
        return (
            f"no network makes it worth while: one that takes no time at all gives {free}. Then "
            f"what bounds is {twice.limit}"
        )
    if twice.unlimited_efficiency is None:
        return f"a network that takes no time gives {free}"
    return (
        f"no {_LINKS[twice.link]} bandwidth makes it worth while: an unlimited one gives "
        f"{twice.unlimited_efficiency:.0%} (a network that takes no time {free}). Then what bounds "
        f"is {twice.limit}"
    )


def _table(plan: CapacityPlan) -> Iterator[str]:
    """A row of each size; a narrow screen has no room for layouts and intervals."""
    level = "" if plan.interval_level is None else f"{plan.interval_level:.0%} interval"
    level = "p10 to p90" if plan.answer.long_run else level
    wide = {"nodes": 9, level: 15} if screen_width() >= _WHOLE_TABLE else {}
    currency = {plan.price.currency[:9]: 10} if plan.price else {}
    widths = {"GPUs": 6, "nodes": 0, "step": 10, "samples/s": 11, "scaling": 8, "x2": 5, "time": 10}
    if any(size.long_run and size.long_run.spares for size in plan.sizes):
        wide |= {"nodes": 13} if wide else {}
        widths |= {"step": 9, "samples/s": 10, "scaling": 8, "x2": 5, "time": 10}
    widths |= {level: 0, "GPU-hours": 10, **currency, "fits": 5} | wide
    yield " " + _row(dict(zip(widths, widths, strict=True)), widths)
    for size in plan.sizes:
        mark = ">" if size.gpus == plan.answer.gpus else " "
        cells = _cells(size, is_priced=plan.price is not None)
        yield mark + _row(dict(zip(widths, cells, strict=True)), widths)
    timed = "half of the runs take less" if plan.answer.long_run else "of all steps"
    yield from _below(
        "scaling: throughput per GPU against one device without DDP; x2: throughput against twice "
        f"that of half the GPUs; time: {timed}; fits: memory (?: activations unknown)"
    )
    if any((size.marginal_efficiency or 0.0) > _MORE_THAN_TWICE for size in plan.sizes):
        waits = "that it has fewer spare nodes, or " if plan.answer.long_run else ""
        yield from _below(
            "x2 above 100%: something holds up the smaller size and not the larger, mostly "
            f"{waits}the algorithm that NCCL takes (`run` names it; cluster.algorithm forces "
            "another)"
        )


def _below(text: str) -> Iterator[str]:
    """Wraps a text beneath the table, as wide as that."""
    width = min(screen_width(), _WHOLE_TABLE - 8)
    yield from wrap(text, width, initial_indent="  ", subsequent_indent="  ")


def _row(cells: Mapping[str, str], widths: Mapping[str, int]) -> str:
    """Joins the cells that have a width."""
    return "".join(f"{cells[title]:>{width}}" for title, width in widths.items() if width)


def _cells(size: Capacity, *, is_priced: bool) -> Iterator[str]:
    marginal = size.marginal_efficiency
    yield f"{size.gpus:,}"
    spares = f" +{size.long_run.spares}" if size.long_run and size.long_run.spares else ""
    yield f"{size.nodes} x {size.gpus_per_node}{spares}"
    yield format_duration(size.step_s)
    yield format_number(size.throughput_samples_per_s)
    yield f"{size.scaling_efficiency:.0%}"
    yield "-" if marginal is None else f"{marginal:.0%}"
    hours, cost = size.billed
    yield format_long_duration(size.calendar_s[0])
    yield _edges(size)
    yield _narrow(hours)
    if is_priced:
        yield "" if cost is None else _narrow(cost)
    yield {True: "yes", False: "NO", None: "?"}[size.fits]


def _narrow(value: float) -> str:
    """A number of at most nine characters."""
    return format_number(value) if value < 9.995e6 else f"{format_number(value / 1e6)} M"


def _edges(size: Capacity) -> str:
    """Writes the edges of a time in the unit of the time beside them."""
    time_s, edges = size.calendar_s
    if edges is None:
        return ""
    unit = format_long_duration(time_s).split()[1]
    low, high = (long_duration_in(unit, edge_s) for edge_s in edges)
    return f"{low} to {high}"


def _trust(plan: CapacityPlan) -> Iterator[str]:
    answer = plan.answer
    yield from labelled("held", _held(plan))
    yield from samples_lines(plan)
    yield from labelled("counted", steps_in_words(plan))
    yield from source_lines(answer.long_run)
    searched = plan.searched
    if plan.sizes[0].nodes == 1 and plan.sizes[0].gpus_per_node < plan.sizes[-1].gpus_per_node:
        searched = f"GPUs of one node in powers of two, {searched}"
    yield from labelled("searched", searched)
    yield from listed("left out", (f"{', '.join(o.sizes)}: {o.reason}" for o in plan.left_out))
    activations = "" if answer.fits is not None else ", activations unknown"
    yield from labelled("memory", f"{format_bytes(answer.memory_bytes)} a GPU{activations}")
    if plan.widest:
        share = plan.widest.high_s / answer.step_s
        text = f"{plan.widest.input} most, +{share:.0%}: {plan.widest.basis}"
        yield from labelled("interval", text)


def _held(plan: CapacityPlan) -> str:
    first, last = plan.sizes[0], plan.sizes[-1]
    if plan.scaling == "strong":
        split = len({size.accumulation_steps for size in plan.sizes}) > 1
        batch = (
            f"the global batch of {first.global_batch:,} samples (strong scaling): "
            f"{_per_rank(first)} to {_per_rank(last)} a rank"
        )
        return f"{batch}, in as many micro-batches as memory needs" if split else batch
    if first is last:
        return f"{_per_rank(first)} samples a rank, a global batch of {first.global_batch:,}"
    batch = (
        f"{first.batch_per_rank:,} samples a rank (weak scaling): the global batch grows from "
        f"{first.global_batch:,} to {last.global_batch:,}"
    )
    if plan.critical_batch is not None or plan.steps_by_batch:
        return batch
    return f"{batch}, and what that does to convergence is not modelled (--global-batch N holds it)"


def _per_rank(size: Capacity) -> str:
    steps = size.accumulation_steps
    return f"{size.batch_per_rank:,}" + (f" x {steps:,} micro-batches" if steps > 1 else "")


def sized(plan: CapacityPlan) -> list[str]:
    """The settings that make the scenario that of the answer."""
    answer = plan.answer
    chosen = [f"cluster.nodes={answer.nodes}"]
    if len({size.gpus_per_node for size in plan.sizes}) > 1:
        chosen.append(f"cluster.gpus_per_node={answer.gpus_per_node}")
    if plan.scaling == "strong":
        chosen.append(f"workload.batch_per_rank={answer.batch_per_rank}")
        if answer.accumulation_steps > 1:
            chosen.append(f"ddp.accumulation_steps={answer.accumulation_steps}")
    return chosen
