"""Tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from serving.measures import Stat, Summary

ROWS = {
    "ttft": "TTFT (ms)",
    "tpot": "TPOT (ms)",
    "itl": "ITL, chunk to chunk (ms)",
    "itl_per_token": "ITL, per token (ms)",
    "e2el": "E2E latency (ms)",
}
DUE_ROWS = {
    "queue": "Queueing in the client (ms)",
    "ttft_from_schedule": "TTFT from schedule (ms)",
    "e2el_from_schedule": "E2E from schedule (ms)",
}
LATE_MS = 5.0
"""Requests that leave the client later than this are worth rows of their own; timers are 1 or 2 ms late anyway."""
MOST_REASONS = 10
LABEL = 34


def line(label: str, value: str) -> str:
    """One row of two columns."""
    return f"{label:<{LABEL}}{value:>12}"


def table(summary: Summary, caches: dict[str, float | None], slo: dict[str, float], *, scheduled: bool) -> str:
    """Everything about one run; `scheduled` is whether requests had times at which they were due."""
    lines = _counts(summary, slo)
    lines += [line(f"Prefix hit rate, {name}", f"{rate:.1%}") for name, rate in caches.items() if rate is not None]
    lines += ["", *_latencies(summary.stats, scheduled)]
    return "\n".join([*lines, *_remarks(summary)])


def _counts(summary: Summary, slo: dict[str, float]) -> list[str]:
    lines = [
        line("Successful requests", f"{summary.completed:,}"),
        line("Failed requests", f"{summary.failed:,}"),
        line("Benchmark duration (s)", f"{summary.duration:.2f}"),
        line("Total input tokens", f"{summary.input_tokens:,}"),
        line("Total generated tokens", f"{summary.output_tokens:,}"),
        line("Request throughput (req/s)", f"{summary.rate(summary.completed):.3f}"),
    ]
    if summary.good is not None:
        lines.append(line("Request goodput (req/s)", f"{summary.rate(summary.good):.3f}"))
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in slo.items())
        lines.append(line(f"  meet {limits}", f"{summary.good:,}"))
    return [
        *lines,
        line("Input token throughput (tok/s)", f"{summary.rate(summary.input_tokens):,.1f}"),
        line("Output token throughput (tok/s)", f"{summary.rate(summary.output_tokens):,.1f}"),
        line("Total token throughput (tok/s)", f"{summary.rate(summary.input_tokens + summary.output_tokens):,.1f}"),
        line("Concurrency, mean and peak", f"{summary.concurrency:.1f}, {summary.peak_concurrency}"),
        line("Tokens per chunk", f"{summary.tokens_per_chunk:.2f}"),
    ]


def _latencies(stats: dict[str, Stat], scheduled: bool) -> list[str]:
    """A row for each latency that has samples; those from the schedule only where they differ."""
    names = dict(ROWS)
    queue = stats.get("queue")
    if scheduled and queue and queue.max > LATE_MS:
        names |= DUE_ROWS
    percents = list(next(iter(stats.values())).percentiles) if stats else []
    heads = ["mean", "median", *(f"p{percent:g}" for percent in percents), "max", "samples"]
    lines = [" " * LABEL + "".join(f"{head:>12}" for head in heads)] if stats else []
    for name, label in names.items():
        if stat := stats.get(name):
            values = [stat.mean, stat.median, *stat.percentiles.values(), stat.max]
            lines.append(f"{label:<{LABEL}}" + "".join(f"{v:>12,.2f}" for v in values) + f"{stat.count:>12,}")
    return lines


def _remarks(summary: Summary) -> list[str]:
    """What a reader of the figures must know."""
    lines = []
    if summary.short:
        lines.append(f"{summary.short:,} outputs are not as long as asked for.")
    if summary.other_input:
        lines.append(f"{summary.other_input:,} prompts have another length by the server's count than by this one.")
    if summary.unseen:
        lines.append(f"{summary.unseen:,} outputs have no text; their first token is dated to their end.")
    if summary.errors:
        lines.append("Failed:")
        lines += [f"{count:>7,} x {reason}" for reason, count in summary.errors.most_common(MOST_REASONS)]
        if len(summary.errors) > MOST_REASONS:
            lines.append(f"        and {len(summary.errors) - MOST_REASONS} other reasons")
    return ["", *lines] if lines else []


def load_words(rate: float | None, offered: float | None, burstiness: float, max_concurrency: int | None) -> str:
    """How the requests of a run come; a rate of None is the trace's own times, an offer of None no schedule."""
    if offered is None:
        return f"the next one as one ends, {max_concurrency} at a time"
    if rate is not None and math.isinf(rate):
        words = "all at once"
    elif rate is None:
        words = f"at the trace's times ({'all the same' if math.isinf(offered) else f'{offered:.3f} req/s'})"
    else:
        process = "Poisson" if burstiness == 1 else f"gamma of burstiness {burstiness:g}"
        words = f"{process} at {rate:g} req/s ({offered:.3f} came out)"
    return words + ("" if max_concurrency is None else f", at most {max_concurrency} at a time")


def comparison(runs: Sequence[dict[str, Any]], percent: float) -> str:
    """A row a run of a sweep."""
    columns = {
        "rate": ("request_rate", "g"),
        "at a time": ("max_concurrency", "g"),
        "failed": ("failed", "d"),
        "req/s": ("request_throughput", ".3f"),
        "goodput": ("request_goodput", ".3f"),
        "out tok/s": ("output_throughput", ",.1f"),
        "TTFT ms": ("mean_ttft_ms", ",.1f"),
        f"p{percent:g}": (f"p{percent:g}_ttft_ms", ",.1f"),
        "TPOT ms": ("mean_tpot_ms", ",.2f"),
        f" p{percent:g}": (f"p{percent:g}_tpot_ms", ",.2f"),
        "E2E ms": ("mean_e2el_ms", ",.1f"),
    }
    lines = ["".join(f"{head:>11}" for head in columns)]
    for run in runs:
        cells = [(run.get(key), form) for key, form in columns.values()]
        lines.append("".join(f"{_cell(value, form):>11}" for value, form in cells))
    return "\n".join(lines)


def _cell(value: Any, form: str) -> str:
    """A number in its form, a word as it is."""
    return "-" if value is None else value if isinstance(value, str) else format(value, form)
