"""Mixed load on one server for a long time: does memory stay flat, and does the accounting balance at the end?

    python benchmark/soak.py --minutes 30 --dcp 4

Clients send short and long prompts, whole and streamed, some sharing prefixes, some leaving in the middle. Prints
memory (PSS over all processes) and counts over time; exits with 1 if anything failed that was not meant to.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from systems.watch import parent_and_ticks, pss_kib

WORDS = ["river", "stone", "bridge", "winter", "light", "paper", "engine", "garden", "copper", "cloud", "market"]


@dataclass
class Tally:
    """What happened so far, and what should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def start_server(dcp: int, extra: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server on a free port; returns it and its URL once it is ready."""
    command = [sys.executable, "-m", "dcprt.launch_server", "--dcp", str(dcp), "--port", "0", *extra]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"ready: (\S+)", line):
            return server, found[1]
    raise SystemExit("The server ended before it was ready.")


def drain(server: subprocess.Popen[str], tracebacks: list[str]) -> None:
    """Read the server's log, so that it never blocks; keep what should not be there."""
    assert server.stderr is not None
    tracebacks.extend(line.strip() for line in server.stderr if "Traceback" in line or "error:" in line)


def pss_mib(root: int) -> float:
    """Proportional set size of a process and its children."""
    parents = {int(entry.name): parent_and_ticks(entry)[0] for entry in Path("/proc").glob("[0-9]*")}
    return sum(pss_kib(process) for process, parent in parents.items() if root in (process, parent)) / 1024


def prompt(chosen: random.Random) -> str:
    """Short, long, or with a beginning that others have too."""
    kind = chosen.random()
    length = chosen.randint(3, 30) if kind < 0.5 else chosen.randint(200, 1500)
    text = " ".join(chosen.choice(WORDS) for _ in range(length))
    if kind > 0.7:
        head = random.Random(chosen.randrange(4))
        text = " ".join(head.choice(WORDS) for _ in range(400)) + " " + text
    return text


async def one_request(client: httpx.AsyncClient, chosen: random.Random, tally: Tally) -> None:
    body: dict[str, Any] = {
        "prompt": prompt(chosen),
        "max_tokens": chosen.choice([1, 8, 32, 100]),
        "temperature": chosen.choice([0, 1]),
        "n": chosen.choice([1, 1, 1, 3]),
        "stream": chosen.random() < 0.5,
    }
    if chosen.random() < 0.1:
        body["logprobs"], body["echo"] = 2, True
    if chosen.random() < 0.05:
        body["max_tokens"] = 100_000
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        expected = 400 if body["max_tokens"] == 100_000 else 200
        tally.counts["whole" if answer.status_code == 200 else "refused"] += 1
        if answer.status_code != expected:
            tally.errors.append(f"{answer.status_code}: {answer.text[:200]}")
        return
    leaves = chosen.randint(1, 10) if chosen.random() < 0.3 else None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            tally.counts["refused"] += 1
            return
        seen = 0
        async for line in answer.aiter_lines():
            seen += line.startswith("data:")
            if '"error"' in line:
                tally.errors.append(line[:200])
            if leaves is not None and seen >= leaves:
                tally.counts["left"] += 1
                return
        tally.counts["streamed"] += 1


async def client_loop(client: httpx.AsyncClient, seed: int, until: float, tally: Tally) -> None:
    chosen = random.Random(seed)
    while time.monotonic() < until:
        try:
            await one_request(client, chosen, tally)
        except httpx.HTTPError as error:
            tally.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(1)


async def watch(client: httpx.AsyncClient, pid: int, until: float, every: float, tally: Tally) -> None:
    print("minute | PSS MiB | whole | streamed | left | refused | preemptions | hit rate", flush=True)
    start = time.monotonic()
    while True:
        info = (await client.get("/server_info")).json()
        totals, c = info["totals"], tally.counts
        rate = totals["cached_tokens"] / max(totals["prompt_tokens"], 1)
        print(
            f"{(time.monotonic() - start) / 60:6.1f} | {pss_mib(pid):7.0f} | {c['whole']} | {c['streamed']} | "
            f"{c['left']} | {c['refused']} | {totals['preemptions']} | {rate:.2f}",
            flush=True,
        )
        if time.monotonic() >= until:
            return
        await asyncio.sleep(min(every, max(until - time.monotonic(), 0.1)))


async def settle(client: httpx.AsyncClient) -> list[str]:
    """Wait for idle, then compare the books."""
    for _ in range(600):
        info = (await client.get("/server_info")).json()
        if not info["running"] and not info["waiting"]:
            break
        await asyncio.sleep(0.1)
    pages, wrong = info["pages"], []
    if pages["in_use"] or pages["free"] + pages["evictable"] != pages["total"]:
        wrong.append(f"at idle: {pages}")
    await client.post("/flush_cache")
    pages = (await client.get("/server_info")).json()["pages"]
    if pages["free"] != pages["total"]:
        wrong.append(f"after a flush: {pages}")
    print(f"idle accounting after a flush: {pages}")
    return wrong


async def soak(url: str, pid: int, minutes: float, clients: int, every: float) -> list[str]:
    tally, until = Tally(), time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=clients + 2)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        loops = [client_loop(client, seed, until, tally) for seed in range(clients)]
        await asyncio.gather(watch(client, pid, until, every, tally), *loops)
        return tally.errors + await settle(client)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--dcp", type=int, default=4)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=120, help="seconds between two rows")
    parser.add_argument("server", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args()
    server, url = start_server(args.dcp, args.server)
    tracebacks: list[str] = []
    reader = threading.Thread(target=drain, args=(server, tracebacks), daemon=True)
    reader.start()
    try:
        wrong = asyncio.run(soak(url, server.pid, args.minutes, args.clients, args.every))
    finally:
        server.send_signal(signal.SIGINT)
        status = server.wait(30)
    wrong += tracebacks + ([f"exit status {status}"] if status else [])
    print("\n".join(wrong) if wrong else "nothing went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
