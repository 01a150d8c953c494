"""Five short lessons: each changes one thing, and asks what comes of it before it shows it."""

from __future__ import annotations

from dataclasses import dataclass

SCENARIO = "resnet50-2x8-25gbit"


@dataclass(frozen=True, slots=True)
class Lesson:
    """What to look at, a question, and the settings that answer it.

    `start` and `change` are settings as --set takes them, of the scenario SCENARIO. `figure`: the
    headline figure that is asked for; `choices`: answers in words, with the ratio, after by before,
    from which each is right, in rising order. The page simulates both, and says which it is.
    """

    name: str
    title: str
    text: str
    start: tuple[str, ...]
    change: tuple[str, ...]
    question: str
    figure: str
    choices: tuple[tuple[str, float], ...]
    after: str


LESSONS = (
    Lesson(
        "overlap",
        "Why overlap",
        "Gradients are ready one after the other, from the last layer to the first. DDP sends "
        "each bucket while the backward goes on. Green communication is hidden under compute. "
        "Hatched orange is exposed: the GPU waits.",
        (),
        ("ddp.strategy=naive_flat",),
        "What happens to the step if all gradients are sent at once, after the backward?",
        "step",
        (("It stays as long", 0.0), ("It grows by 5 to 25 %", 1.05), ("It grows by more", 1.25)),
        "The same bytes take the same time, but nothing is left to hide them under.",
    ),
    Lesson(
        "buckets",
        "Why buckets",
        "Each all-reduce costs some latency, whatever its size. A bucket gathers gradients until "
        "it is full (bucket_cap_mb), so that fewer and larger messages are sent.",
        ("cluster.inter_node.latency=50 us",),
        ("ddp.strategy=per_parameter",),
        "What happens to the step if each gradient is sent on its own, as soon as it is ready?",
        "step",
        (
            ("It gets shorter", 0.0),
            ("It hardly changes", 0.97),
            ("It grows by a third or more", 1.3),
        ),
        "161 small all-reduces pay the latency 161 times. One large bucket is no answer: it would "
        "start when the backward ends. Move the bucket cap to see both ends.",
    ),
    Lesson(
        "no_sync",
        "no_sync",
        "With gradient accumulation an optimizer step has several micro-batches. Under no_sync "
        "only the last one sends gradients.",
        ("ddp.accumulation_steps=4", "ddp.no_sync=false"),
        ("ddp.no_sync=true",),
        "What does no_sync do to the exposed communication of a step of four micro-batches?",
        "exposed",
        (
            ("It falls to about a quarter", 0.0),
            ("It falls to about a half", 0.4),
            ("It stays", 0.8),
        ),
        "Only one backward of four sends anything: three rounds of all-reduces are gone.",
    ),
    Lesson(
        "ring",
        "The ring: 2(N-1)/N",
        "In a ring of N ranks each bucket is cut into N chunks. N-1 ring steps sum them, N-1 more "
        "hand the sums round. So a rank sends 2(N-1)/N of the bucket, whatever N is: close to "
        "twice its size. Tick ring steps, and go through one all-reduce with the arrow keys.",
        ("cluster.gpus_per_node=1", "cluster.nodes=8", "cluster.algorithm=ring"),
        ("cluster.nodes=16",),
        "From 8 to 16 ranks: what happens to the time in which communication is in flight?",
        "communication",
        (
            ("It hardly changes", 0.0),
            ("It grows by a quarter or more", 1.25),
            ("It doubles", 1.8),
        ),
        "2(N-1)/N grows from 1.75 to 1.88. Only the latency of more steps grows with N.",
    ),
    Lesson(
        "straggler",
        "A straggler",
        "An all-reduce ends when the last rank has joined. So one slow rank sets the time of all.",
        ("cluster.inter_node.bandwidth=100 Gbit/s",),
        ("cluster.stragglers={factors: {5: 1.3}}",),
        "One of 16 ranks computes 30 % more slowly. What happens to the step of all?",
        "step",
        (
            ("It grows by a sixteenth of that, 2 %", 0.0),
            ("It grows by about 10 %", 1.05),
            ("It grows by 20 % or more", 1.15),
        ),
        "Fifteen ranks wait for one. The average rank says nothing about the step.",
    ),
)


def lesson_names() -> tuple[str, ...]:
    """Say what the lessons are called, in their order."""
    return tuple(lesson.name for lesson in LESSONS)
