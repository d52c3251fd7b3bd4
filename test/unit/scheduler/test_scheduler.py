"""Any history of arrivals, aborts, preemptions and evictions gives each request what it would get alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from dcprt.errors import RequestError
from dcprt.kv.layout import Layout
from dcprt.messages import RequestFailed
from dcprt.params import SamplingParams
from dcprt.scheduler.core import Core
from dcprt.scheduler.request import State
from dcprt.scheduler.scheduler import Limits

from ..hypothesis_profile import search
from .bench import Bench
from .fake_workers import reference

A, B, C = 1, 2, 3


@dataclass(frozen=True)
class Arrive:
    """A prompt that begins like one before it, then runs of equal tokens, in quarters of a span and single ones."""

    base: int
    cut: int
    runs: list[tuple[int, int, int]]
    max_tokens: int
    namespace: str


@dataclass(frozen=True)
class Step:
    """Compute; an abort may come while the workers are busy."""

    count: int
    abort_in_flight: int | None


@dataclass(frozen=True)
class AbortOne:
    """End the n-th request so far, whatever its state."""

    which: int


@dataclass(frozen=True)
class Setup:
    """A deployment that is small enough for everything to run out."""

    layout: Layout
    pages: int
    chunk: int
    max_running: int
    reuse: bool
    ahead: int


LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 4), (1, 3, 1), (2, 2, 1), (3, 2, 3), (4, 4, 2), (16, 2, 1), (16, 4, 16)]
SETUPS = st.builds(
    Setup,
    layout=st.sampled_from([Layout(*sizes) for sizes in LAYOUTS]),
    pages=st.integers(1, 16),
    chunk=st.sampled_from([2048, 64, 16, 7, 3, 2, 1]),
    max_running=st.sampled_from([8, 3, 2, 1]),
    reuse=st.sampled_from([True, True, True, False]),
    ahead=st.integers(0, 1),
)
RUN = st.tuples(st.sampled_from([A, B]), st.integers(0, 12), st.integers(0, 3))
ARRIVALS = st.builds(
    Arrive,
    base=st.integers(0, 9),
    cut=st.integers(0, 200),
    runs=st.lists(RUN, min_size=1, max_size=3),
    max_tokens=st.integers(1, 80),
    namespace=st.sampled_from(["", "", "salt"]),
)
STEPS = st.builds(Step, st.integers(1, 20), st.none() | st.integers(0, 9))
EVENTS = st.lists(
    st.lists(ARRIVALS, min_size=1, max_size=5) | st.lists(STEPS | st.builds(AbortOne, st.integers(0, 9)), max_size=3),
    min_size=3,
    max_size=12,
)


class History:
    """Plays events on a bench."""

    def __init__(self, setup: Setup, eos: frozenset[int]) -> None:
        self.bench = Bench(
            setup.layout,
            setup.pages,
            chunk=setup.chunk,
            max_running=setup.max_running,
            reuse=setup.reuse,
            eos=eos,
            ahead=setup.ahead,
        )
        self._known: list[list[int]] = [[]]

    def play(self, what: Arrive | Step | AbortOne) -> None:
        if isinstance(what, Arrive):
            self._arrive(what)
        elif isinstance(what, AbortOne):
            self._abort(what.which)
        else:
            for _ in range(what.count):
                which = what.abort_in_flight
                self.bench.step(None if which is None else lambda which=which: self._abort(which))

    def _arrive(self, what: Arrive) -> None:
        limits = self.bench.scheduler.limits
        base = self._known[what.base % len(self._known)]
        prompt = base[: what.cut % (len(base) + 1)]
        for token, quarters, ones in what.runs:
            prompt = prompt + [token] * (quarters * self.bench.store.layout.span_tokens // 4 + ones)
        prompt = prompt[: limits.max_len - 1]
        if prompt:
            max_tokens = min(what.max_tokens, limits.output_room(len(prompt), None))
            self.bench.send(prompt, max_tokens, namespace=what.namespace)
            self._known.append(prompt + reference(prompt, max_tokens)[0])

    def _abort(self, which: int) -> None:
        rids = list(self.bench.clients)
        if rids:
            self.bench.abort(rids[which % len(rids)])


@given(setup=SETUPS, events=EVENTS, eos=st.sampled_from([frozenset(), frozenset(range(0, 97, 10))]))
@search(250)
def test_every_history_ends_with_the_tokens_of_the_model(
    setup: Setup, events: list[list[Arrive | Step | AbortOne]], eos: frozenset[int]
) -> None:
    history = History(setup, eos)
    for what in chain.from_iterable(events):
        history.play(what)
    bench = history.bench
    bench.run()
    bench.verify_all()
    event(f"preempted: {bench.scheduler.counters.preemptions > 0}")
    event(f"tails copied: {any(body.copies for body in bench.workers.bodies)}")
    bench.store.cache.flush()
    assert bench.store.allocator.free_pages == bench.store.allocator.capacity


# ---- one request after another


def test_k1_a_hit_ends_at_the_first_different_token() -> None:
    bench = Bench(Layout(16, 2), 64)
    bench.ask([A] * 150 + [B] * 400, 8)
    assert bench.ask([A] * 150 + [C] * 400, 8).cached == 150


@pytest.mark.parametrize("layout", [Layout(1), Layout(16), Layout(4, 4, 2), Layout(16, 8)])
def test_k2_k9_a_short_prompt_again(layout: Layout) -> None:
    bench = Bench(layout, 64)
    assert bench.ask([A, B, C, A, B, C], 5).cached == 0
    assert bench.ask([A, B, C, A, B, C], 5).cached == 5
    assert bench.ask([A], 5).cached == 0


@pytest.mark.parametrize("chunk", [1, 3, 64, 2048])
def test_k4_chunks_of_any_size_give_one_answer(chunk: int) -> None:
    bench = Bench(Layout(16, 4), 32, chunk=chunk)
    prompt = [random.Random(4).randrange(97) for _ in range(1_003)]
    bench.ask(prompt, 5)
    assert bench.workers.computed_tokens == 1_003 + 4


def test_k5_recycled_pages_carry_nothing_over() -> None:
    bench = Bench(Layout(4, 2), 12)
    first = bench.ask([A] * 20, 10).tokens
    for token in range(4, 16):
        bench.ask([token] * 50, 10)
    assert bench.workers.computed_tokens > 3 * bench.store.capacity_tokens
    again = bench.ask([A] * 20, 10)
    assert (again.tokens, again.cached) == (first, 0)


@pytest.mark.parametrize("prompt_len", range(250, 256))
def test_k6_a_prompt_near_the_context_limit_stays_in_its_pages(prompt_len: int) -> None:
    bench = Bench(Layout(16, 4), 4, context=256)
    client = bench.send([A] * prompt_len, None)
    bench.run()
    bench.verify(client)
    assert len(client.tokens) == 256 - prompt_len


def test_k7_a_pool_of_8192_tokens_serves_8192_tokens_over_four_ranks() -> None:
    bench = Bench(Layout(16, 4), 128)
    assert bench.store.capacity_tokens == 8192
    assert len(bench.ask([A] * 8_180, 12).tokens) == 12
    assert len(bench.ask([B] * 5_000 + [C], 100).tokens) == 100
    with pytest.raises(RequestError, match="8193"):
        bench.send([A] * 8_180, 13)


def test_k8_a_second_turn_reuses_what_the_first_generated() -> None:
    bench = Bench(Layout(16, 4), 32)
    first = bench.ask([A, B] * 50, 50)
    second = bench.ask([A, B] * 50 + first.tokens + [C] * 50, 5)
    assert second.cached == 149, "all but the last generated token, which had no KV yet"


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 128])
def test_k9_k10_an_equal_prompt_computes_one_token_only(length: int) -> None:
    bench = Bench(Layout(16, 4), 32)
    prompt = [A, B, C, B][: length % 4] + [A] * (length - length % 4)
    cold = bench.ask(prompt, 6)
    before = bench.workers.computed_tokens
    warm = bench.ask(prompt, 6)
    assert warm.tokens == cold.tokens
    assert warm.cached == length - 1
    assert bench.workers.computed_tokens - before == 6


def test_k13_equal_tokens_in_other_namespaces_share_nothing() -> None:
    bench = Bench(Layout(4, 2), 32)
    bench.ask([A] * 40, 5, namespace="one")
    assert bench.ask([A] * 40, 5, namespace="two").cached == 0
    assert bench.ask([A] * 40, 5).cached == 0
    assert bench.ask([A] * 40, 5, namespace="one").cached == 39


def test_without_reuse_nothing_is_kept() -> None:
    bench = Bench(Layout(4, 2), 32, reuse=False)
    for _ in range(2):
        assert bench.ask([A] * 40, 5).cached == 0
    assert bench.store.allocator.free_pages == 32
    assert bench.scheduler.counters.cached_tokens == 0


def test_without_reuse_many_namespaces_leave_nothing() -> None:
    bench = Bench(Layout(4, 2), 32, reuse=False)
    for i in range(20):
        bench.ask([A] * 10, 2, namespace=f"salt {i}")
    assert not bench.store.cache._roots


# ---- limits


def test_s10_a_prompt_far_over_the_limit_is_refused_with_both_numbers() -> None:
    bench = Bench(Layout(16, 4), 16, context=512)
    with pytest.raises(RequestError) as caught:
        bench.send([A] * 100_000, 7)
    text = str(caught.value)
    assert "100000" in text
    assert "512" in text
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    assert caught.value.code == "context_length_exceeded"
    bench.check_idle()
    assert bench.store.allocator.free_pages == 16
    bench.ask([A] * 10, 3)


@pytest.mark.parametrize(("context", "pages"), [(100, 64), (1 << 20, 10)])
def test_s11_exactly_at_the_limit_is_served_to_the_last_token(context: int, pages: int) -> None:
    bench = Bench(Layout(5, 2), pages, context=context)
    assert bench.scheduler.limits.max_len == 100
    assert len(bench.ask([A] * 60, 40).tokens) == 40
    assert len(bench.ask([B] * 99, 1).tokens) == 1
    with pytest.raises(RequestError, match=r"60 tokens and 41 .* 101 together; at most 100 fit") as caught:
        bench.send([A] * 60, 41)
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestError, match=r"100 tokens and 1 .* 101 together") as caught:
        bench.send([A] * 100, 1)
    assert caught.value.param == "prompt"


def test_no_max_tokens_fills_the_context() -> None:
    limits = Limits(context_len=100, capacity_tokens=1000, vocab_size=97)
    assert limits.output_room(60, None) == 40
    with pytest.raises(RequestError, match="100 tokens and at least 1 new ones"):
        limits.output_room(100, None)


def test_k14_one_that_can_never_fit_is_refused_and_the_others_go_on() -> None:
    bench = Bench(Layout(4, 2), 8)
    others = [bench.send([token] * 10, 10) for token in (A, B)]
    bench.step()
    with pytest.raises(RequestError, match="64"):
        bench.send([C] * 65, 1)
    bench.run()
    for client in others:
        bench.verify(client)


def test_k14_those_that_fit_alone_but_not_together_take_turns() -> None:
    bench = Bench(Layout(2, 2), 10)
    clients = [bench.send([token] * 10, 30) for token in (A, B, C)]
    bench.run()
    bench.verify_all()
    assert bench.scheduler.counters.preemptions > 0
    assert clients[0].request.preemptions == 0


# ---- pages run out


def test_k12_a_resumed_request_counts_its_hit_once() -> None:
    bench = Bench(Layout(2, 2), 10)
    bench.ask([A] * 8, 1)
    clients = [bench.send([A] * 8 + [token], 24) for token in (A, B, C)]
    bench.run()
    bench.verify_all()
    assert sum(client.request.preemptions for client in clients) > 0
    assert [client.cached for client in clients] == [8, 8, 8]
    counters = bench.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (8 + 27, 24)


def test_s6_the_last_running_request_is_preempted_and_the_step_is_empty() -> None:
    bench = Bench(Layout(1), 13, chunk=8)
    client = bench.send([A] * 4 + [B] * 4, 5)
    assert bench.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store, "grow", lambda request, length: None)
        assert not bench.step(), "no page for the only request, and nobody else to take one from"
    assert client.request.preemptions == 1
    assert client.request.state is State.WAITING
    assert client.request.computed_len == 0
    assert not bench.scheduler.running
    bench.run()
    bench.verify_all()


def test_preemption_takes_the_one_admitted_last_and_puts_it_first_in_the_queue() -> None:
    bench = Bench(Layout(1), 12, max_running=3)
    clients = [bench.send([token] * 3, 6) for token in (A, B, C)]
    late = bench.send([4] * 3, 2)
    while not bench.scheduler.counters.preemptions:
        bench.step()
    assert [client.request.preemptions for client in clients] == [0, 0, 1]
    assert list(bench.scheduler.waiting) == [clients[2].request, late.request]
    bench.run()
    bench.verify_all()


@pytest.mark.parametrize(("pages", "cached"), [(1, 0), (2, 2)])
def test_a_tail_copy_that_does_not_fit_is_left_out(pages: int, cached: int) -> None:
    bench = Bench(Layout(2, 2), pages)
    bench.ask([A, B], 1)
    client = bench.ask([A, B, C], 1)
    assert client.cached == cached
    assert len(bench.workers.plan.copies) == (1 if cached else 0)


def test_a_hit_of_whole_spans_in_a_full_pool_goes_on_without_its_tail() -> None:
    bench = Bench(Layout(2, 2), 3)
    bench.ask([A] * 10, 1)
    client = bench.send([A] * 10 + [B], 1)
    bench.run()
    bench.verify(client)
    assert client.cached == 8
    assert bench.workers.plan.copies == []


def test_several_requests_copy_one_tail_in_one_plan() -> None:
    bench = Bench(Layout(4, 2), 16)
    bench.ask([A] * 13, 1)
    for token in (B, C, 4):
        bench.send([A] * 13 + [token] * 5, 3)
    bench.step()
    copies = bench.workers.plan.copies
    assert len(copies) == 3
    assert len({copy.src for copy in copies}) == 1
    bench.run()
    bench.verify_all()


def test_equal_prompts_in_one_step_keep_one_copy_in_the_end() -> None:
    bench = Bench(Layout(4, 2), 32)
    for _ in range(4):
        bench.send([A] * 40, 3)
    bench.run()
    bench.verify_all()
    assert len(list(bench.store.cache.pages())) == 6


def test_who_computed_the_same_as_another_locks_nothing_of_the_other() -> None:
    bench = Bench(Layout(4, 2), 32)
    first, second = bench.send([A] * 40, 1), bench.send([A] * 40, 10)
    bench.step()
    assert (first.finished, second.finished) == (True, False)
    assert bench.store.cache.evictable_pages == 5
    bench.run()
    bench.verify_all()


def test_a_prompt_under_way_can_be_matched_by_the_next_step() -> None:
    bench = Bench(Layout(4, 2), 64, chunk=32)
    bench.send([A] * 100, 1)
    bench.step()
    second = bench.send([A] * 32 + [B] * 3, 1)
    bench.run()
    bench.verify_all()
    assert second.cached == 32


# ---- aborts


def test_s2_abort_while_waiting() -> None:
    bench = Bench(Layout(4), 16, max_running=1)
    bench.send([A] * 8, 4)
    bench.step()
    bench.send([B] * 8, 4, rid="x")
    assert bench.clients["x"].request.state is State.WAITING
    assert bench.abort("x") is not None
    bench.run()
    bench.verify_all()


def test_s2_abort_in_the_middle_of_a_prompt() -> None:
    bench = Bench(Layout(4), 32, chunk=8)
    client = bench.send([A] * 50, 4, rid="x")
    bench.step()
    assert 0 < client.request.computed_len < 50
    bench.abort("x")
    bench.check_idle()
    assert bench.ask([A] * 50, 4).cached == 8


def test_s2_abort_while_running_frees_within_the_step() -> None:
    bench = Bench(Layout(4), 32)
    bench.send([A] * 8, 20, rid="x")
    for _ in range(3):
        bench.step()
    bench.abort("x")
    bench.check_idle()
    assert bench.step() is False


def test_s2_abort_while_preempted() -> None:
    bench = Bench(Layout(1), 12, max_running=3)
    clients = [bench.send([token] * 3, 8) for token in (A, B, C)]
    while not clients[2].request.preemptions:
        bench.step()
    assert clients[2].request.state is State.WAITING
    assert bench.abort(clients[2].request.rid) is not None
    bench.run()
    bench.verify_all()


def test_s2_abort_in_flight_drops_the_result() -> None:
    bench = Bench(Layout(4), 32)
    client = bench.send([A] * 8, 20, rid="x")
    bench.step()
    bench.step(lambda: bench.abort("x") and None)
    assert len(client.tokens) == 1
    bench.check_idle()
    assert bench.ask([A] * 8, 20).cached == 7


def test_s2_abort_twice_and_unknown_and_part_of_an_id() -> None:
    bench = Bench(Layout(4), 32)
    bench.send([A] * 8, 5, rid="request-12")
    assert bench.abort("request-1") is None
    assert bench.abort("request") is None
    assert bench.abort("") is None
    assert bench.abort("request-12") is not None
    assert bench.abort("request-12") is None
    bench.check_idle()


def test_the_id_of_an_aborted_request_can_be_used_again_in_the_same_step() -> None:
    bench = Bench(Layout(4), 32)
    bench.send([A] * 8, 5, rid="x")
    bench.step()

    def replace() -> None:
        bench.abort("x")
        bench.verify(bench.clients.pop("x"))
        bench.send([B] * 6, 5, rid="x")

    bench.step(replace)
    bench.run()
    bench.verify_all()


def test_s3_a_second_live_request_with_the_same_id_is_refused() -> None:
    bench = Bench(Layout(4), 32)
    first = bench.send([A] * 8, 5, rid="x")
    bench.step()
    with pytest.raises(RequestError, match="'x'") as caught:
        bench.send([B] * 8, 5, rid="x")
    assert (caught.value.status, caught.value.param) == (400, "rid")
    bench.clients["x"] = first
    bench.run()
    bench.verify(first)
    assert bench.ask([B] * 8, 5, rid="x").cached == 0


# ---- the order of things


def test_a_row_is_dropped_and_taken_again_in_one_plan() -> None:
    bench = Bench(Layout(4), 32, max_running=1)
    bench.send([A] * 8, 2)
    bench.send([B] * 8, 2)
    for _ in range(3):
        bench.step()
    plan = bench.workers.plan
    assert plan.drops == [0]
    assert [add.row for add in plan.adds] == [0]
    bench.run()
    bench.verify_all()


def test_a_chunk_is_shared_by_several_prompts_and_never_exceeded() -> None:
    bench = Bench(Layout(4), 64, chunk=20)
    for token, length in [(A, 12), (B, 30), (C, 7)]:
        bench.send([token] * length, 2)
    counts = []
    while not bench.scheduler.idle:
        bench.step()
        counts.append([(work.num_tokens, work.max_new) for work in bench.workers.plan.work])
    assert counts[:3] == [[(12, 1), (8, 0)], [(1, 1), (20, 0)], [(2, 1), (7, 1)]]
    bench.verify_all()


def test_s4_decodes_go_on_in_every_step_of_a_long_prefill() -> None:
    bench = Bench(Layout(16, 4), 256, chunk=64)
    decoding = [bench.send([token] * 5, 60) for token in range(1, 9)]
    bench.step()
    long = bench.send([9] * 2_000, 2)
    while not long.outputs:
        before = [len(client.tokens) for client in decoding]
        bench.step()
        assert [len(client.tokens) for client in decoding] == [count + 1 for count in before]
    bench.run()
    bench.verify_all()


def test_requests_are_served_in_order_of_arrival() -> None:
    bench = Bench(Layout(4, 2), 40, chunk=16, max_running=3)
    clients = [bench.send([token] * length, 3) for token, length in enumerate([40, 3, 90, 1, 17, 64, 2], 1)]
    bench.run()
    bench.verify_all()
    admitted = [client.request.rid for client in clients]
    starts = [add.row for body in bench.workers.bodies for add in body.adds]
    assert len(starts) == len(clients)
    firsts = [client.first_step or 0 for client in clients]
    assert firsts == sorted(firsts), dict(zip(admitted, firsts, strict=True))


def test_a_big_request_at_the_head_is_not_overtaken() -> None:
    bench = Bench(Layout(4), 16)
    bench.send([A] * 30, 20)
    bench.step()
    big, small = bench.send([B] * 50, 4), bench.send([C] * 2, 2)
    bench.run()
    bench.verify_all()
    assert (big.first_step or 0) <= (small.first_step or 0)


def test_stop_tokens_and_eos_end_a_request_with_the_token() -> None:
    output, _ = reference([A] * 5, 20)
    bench = Bench(Layout(4), 32, eos=frozenset({output[3]}))
    client = bench.send([A] * 5, 20)
    bench.run()
    assert client.tokens == output[: output.index(output[3]) + 1]
    finish = client.outputs[-1].finish
    assert finish is not None
    assert (finish.reason, finish.matched) == ("stop", output[3])


def test_ignore_eos_and_stop_token_ids() -> None:
    output, _ = reference([A] * 5, 20)
    bench = Bench(Layout(4), 32, eos=frozenset({output[3]}))
    client = bench.send([A] * 5, 20)
    client.request.sampling = SamplingParams(ignore_eos=True, stop_token_ids=(output[6],))
    bench.run()
    assert client.tokens == output[: output.index(output[6]) + 1]


def test_core_steps_until_idle() -> None:
    bench = Bench(Layout(4, 2), 32)
    client = bench.send([A] * 20, 6)
    core = Core(bench.scheduler, bench.workers)
    outputs = []
    while not bench.scheduler.idle:
        outputs += core.step()
    assert [token for output in outputs for token in output.token_ids] == reference([A] * 20, 6)[0]
    assert core.step() == []
    assert client.request.state is State.ENDED


# ---- many at once


@pytest.mark.parametrize(("clients", "pages"), [(20, 40), (256, 600), (256, 90)])
def test_k11_many_clients_with_shared_prefixes_and_aborts(clients: int, pages: int) -> None:
    chance = random.Random(clients + pages)
    bench = Bench(Layout(4, 2), pages, chunk=128, max_running=64)
    prefixes = [[chance.randrange(97) for _ in range(chance.randrange(5, 60))] for _ in range(6)]
    waiting = clients
    while waiting or not bench.scheduler.idle:
        for _ in range(min(waiting, chance.randrange(12))):
            waiting -= 1
            prompt = chance.choice(prefixes) + [chance.randrange(3) for _ in range(chance.randrange(1, 20))]
            bench.send(prompt, chance.randrange(1, 24))
        if bench.clients and chance.random() < 0.2:
            bench.abort(chance.choice(list(bench.clients)))
        bench.step()
    bench.check_idle()
    bench.verify_all()
    assert any(client.aborted for client in bench.clients.values())
    assert bench.scheduler.counters.cached_tokens > 0
    bench.store.cache.flush()
    assert bench.store.allocator.free_pages == pages


@pytest.mark.parametrize("length", [1, 7, 30])
def test_nothing_of_a_failed_request_is_reused(length: int) -> None:
    bench = Bench(Layout(4, 2), 40, chunk=16)
    prompt = [A] * length
    bench.send(prompt, 5, rid="fails")
    found: list[object] = []
    while not found:
        body = bench.scheduler.plan()
        assert body is not None
        bench.workers.submit(bench.write(body))
        tokens = bench.workers.result().tokens
        found = list(bench.scheduler.apply([], failed=[(row, "no number") for row, _ in tokens]))
        bench.scheduler.check()
    expected = f"Token {length} cannot be chosen: no number."
    assert found == [RequestFailed(rid="fails", message=expected, status=500)]
    assert bench.store.allocator.free_pages == bench.store.allocator.capacity
    assert bench.ask(prompt, 5).cached == 0
