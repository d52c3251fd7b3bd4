"""The offline engine, in this process and in scripts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dcprt import Engine, SamplingParams
from dcprt.errors import ConfigError, DcprtError, GridError, ModelError, RequestError, RuntimeFailed
from dcprt.tokenizer.text import TextCodec

from .engine_script import Script, output
from .processes import role, wait_until, with_tmpdir

STORY = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)

HELLO = """
from dcprt import Engine, SamplingParams
with Engine(OPTIONS) as engine:
    print(engine.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4)).text)
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dcp=2, dtype="float32", kv_cache_tokens=4096) as running:
        yield running


def settle(engine: Engine) -> dict[str, Any]:
    """The state once nothing runs."""
    assert wait_until(lambda: not engine.server_info()["running"] and not engine.server_info()["waiting"])
    return engine.server_info()


def test_one_prompt_gives_one_output(engine: Engine, codec: TextCodec) -> None:
    answer = engine.generate(STORY, GREEDY)
    assert answer.text == codec.decode(answer.token_ids)
    assert (len(answer.token_ids), answer.finish_reason, answer.matched_stop) == (6, "length", None)
    assert answer.usage.prompt_tokens == len(codec.encode(STORY))
    assert answer.usage.completion_tokens == 6
    again = engine.generate(codec.encode(STORY), GREEDY)
    assert again.token_ids == answer.token_ids
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


def test_many_prompts_keep_their_order_and_parameters(engine: Engine, codec: TextCodec) -> None:
    prompts: list[Any] = [STORY, codec.encode("One, two, three,"), "Hello", [500]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 1, 3, 2)]
    outputs = engine.generate(prompts, params)
    assert [len(answer.token_ids) for answer in outputs] == [5, 1, 3, 2]
    alone = [engine.generate(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    assert [answer.token_ids for answer in outputs] == [answer.token_ids for answer in alone]
    assert engine.generate([], GREEDY) == []
    assert len(engine.generate([STORY], GREEDY)) == 1


def test_stop_and_seed(engine: Engine) -> None:
    text = engine.generate(STORY, GREEDY).text
    stopped = engine.generate(STORY, SamplingParams(temperature=0, max_tokens=6, stop=(text[3:8],)))
    assert (stopped.text, stopped.finish_reason, stopped.matched_stop) == (text[:3], "stop", text[3:8])
    seeded = SamplingParams(seed=5, max_tokens=6, ignore_eos=True)
    alone = engine.generate(STORY, seeded).token_ids
    assert [answer.token_ids for answer in engine.generate([STORY, "Hello", STORY], seeded)][::2] == [alone, alone]


def test_a_stream_adds_up(engine: Engine) -> None:
    whole = engine.generate(STORY, GREEDY)
    pieces = list(engine.stream(STORY, GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[-1].usage.completion_tokens == 6


def test_leaving_a_stream_aborts_it(engine: Engine) -> None:
    stream = engine.stream(STORY, LONG)
    next(stream)
    assert len(engine.server_info()["running"]) == 1
    stream.close()
    assert settle(engine)["pages"]["in_use"] == 0


def test_chat(engine: Engine) -> None:
    answer = engine.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert answer.text.startswith("The capital of France is")


def test_in_an_event_loop(engine: Engine) -> None:
    async def main() -> tuple[list[Any], list[Any]]:
        many = await asyncio.gather(*(engine.async_generate(prompt, GREEDY) for prompt in (STORY, "Hello")))
        pieces = [piece async for piece in engine.async_stream(STORY, GREEDY)]
        left = engine.async_stream(STORY, LONG)
        async for _ in left:
            break
        await left.aclose()
        waiting = asyncio.ensure_future(engine.async_generate(STORY, LONG))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return many, pieces

    many, pieces = asyncio.run(main())
    assert [answer.token_ids for answer in many] == [a.token_ids for a in engine.generate([STORY, "Hello"], GREEDY)]
    assert "".join(piece.text for piece in pieces) == many[0].text
    assert settle(engine)["pages"]["in_use"] == 0


def test_a_progress_bar_for_many(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    short = SamplingParams(max_tokens=1)
    engine.generate([STORY] * 3, short)
    assert capfd.readouterr().err == ""
    engine.generate([STORY] * 16, short)
    shown = capfd.readouterr()
    assert "16/16" in shown.err
    assert shown.out == ""
    engine.generate([STORY] * 16, short, progress=False)
    assert capfd.readouterr().err == ""
    engine.generate([STORY], short, progress=True)
    assert "1/1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", GREEDY, "empty"),
        ([], GREEDY, "empty"),
        ([10**6], GREEDY, "1000000"),
        ([-1], GREEDY, "-1"),
        ([2**40], GREEDY, "31 bits"),
        ([500] * 5000, GREEDY, "4096"),
        ([500] * 100, SamplingParams(max_tokens=4000), "4100"),
        ("\ud800", GREEDY, "prompt"),
        (STORY, SamplingParams(stop=("\ud800",)), "prompt"),
        (STORY, SamplingParams(stop="word"), "stop"),  # type: ignore[arg-type]
        (STORY, SamplingParams(max_tokens=5.5), "max_tokens"),  # type: ignore[arg-type]
        (STORY, SamplingParams(seed=1.5), "seed"),  # type: ignore[arg-type]
        (STORY, SamplingParams(ignore_eos="no"), "ignore_eos"),  # type: ignore[arg-type]
    ],
)
def test_wrong_requests(engine: Engine, prompt: Any, params: SamplingParams, words: str) -> None:
    single = [prompt] if prompt == [] else prompt
    for attempt in (
        lambda: engine.generate(single, params),
        lambda: list(engine.stream(prompt, params)),
        lambda: asyncio.run(engine.async_generate(prompt, params)),
    ):
        with pytest.raises(RequestError, match=words):
            attempt()
    assert settle(engine)["pages"]["in_use"] == 0
    assert engine.generate(STORY, GREEDY).finish_reason == "length"


def test_one_wrong_prompt_of_many_aborts_the_others(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.generate([STORY, ""], LONG)
    assert settle(engine)["pages"]["in_use"] == 0
    with pytest.raises(RequestError, match="2 prompts and 1"):
        engine.generate([STORY, STORY], [GREEDY])


def test_wrong_chats(engine: Engine) -> None:
    for messages in ([{"role": "user", "content": object()}], [{"role": "user", "content": 10**40}], [{}]):
        with pytest.raises(RequestError):
            engine.chat(messages, GREEDY)
    assert engine.generate(STORY, GREEDY).finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"dpc": 4}, ConfigError, "Did you mean 'dcp'?"),
        ({"dcp": "4"}, ConfigError, "dcp takes int"),
        ({"tp": 4, "dcp": 3}, GridError, "1, 2, 4"),
        ({"model": "smollm2"}, ModelError, "smollm2-135m"),
        ({"context_length": 10000}, ConfigError, "8192"),
        ({"kv_cache_tokens": 3}, ConfigError, "16"),
    ],
)
def test_wrong_options(options: dict[str, Any], kind: type[DcprtError], words: str) -> None:
    with pytest.raises(kind, match=words.replace("?", r"\?")):
        Engine(**options)


def test_two_engines_at_once(engine: Engine) -> None:
    """S8."""
    with Engine(dtype="float32", kv_cache_tokens=1024) as other:
        assert other.generate(STORY, GREEDY).token_ids == engine.generate(STORY, GREEDY).token_ids
    assert engine.generate(STORY, GREEDY).finish_reason == "length"


def test_after_close() -> None:
    engine = Engine(dtype="float32", kv_cache_tokens=2048)
    stream = engine.stream(STORY, LONG)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeFailed):
        list(stream)
    for attempt in (
        lambda: engine.generate(STORY, GREEDY),
        lambda: list(engine.stream(STORY, GREEDY)),
        lambda: engine.chat([{"role": "user", "content": "Hello"}]),
        lambda: asyncio.run(engine.async_generate(STORY, GREEDY)),
        engine.server_info,
    ):
        with pytest.raises(RuntimeFailed, match="closed"):
            attempt()


# ---- scripts


def test_a_script_without_a_main_guard() -> None:
    assert "Paris" in output(HELLO)


def test_from_standard_input_in_a_hostile_directory() -> None:
    assert "Paris" in output(HELLO, stdin=True)


def test_modules_in_the_working_directory_are_not_imported() -> None:
    names = ("queue.py", "random.py", "torch.py", "socket.py", "dcprt.py", "sitecustomize.py", "numpy.py", "zmq.py")
    assert "Paris" in output(HELLO, beside=names)


def test_two_engines_one_after_the_other() -> None:
    assert output(HELLO + HELLO).count("Paris") == 2


def test_a_script_that_raises_leaves_nothing() -> None:
    for guard in ("with Engine(OPTIONS) as engine:", "if engine := Engine(OPTIONS):"):
        body = "next(engine.stream('Hello'))\n    raise ValueError('on purpose')"
        text = f"from dcprt import Engine\n{guard}\n    {body}"
        with Script(text) as script:
            status, _, err = script.end()
        assert status == 1
        assert err.count("Traceback") == 1, err
        assert err.rstrip().endswith("ValueError: on purpose"), err


def test_a_script_that_forgets_to_close_leaves_nothing() -> None:
    text = """
from dcprt import Engine, SamplingParams
engine = Engine(OPTIONS)
print(engine.generate("Hello", SamplingParams(max_tokens=2)).finish_reason)
stream = engine.stream("Hello", SamplingParams(max_tokens=1000, ignore_eos=True))
next(stream)
"""
    assert output(text).strip() == "length"


def test_a_script_that_exits_the_hard_way_leaves_nothing() -> None:
    with Script("import os\nfrom dcprt import Engine\nengine = Engine(OPTIONS)\nos._exit(3)") as script:
        assert script.end() == (3, "", "")


INTERRUPTED = """
import sys
from dcprt import Engine, SamplingParams
long = SamplingParams(max_tokens=1500, ignore_eos=True)
with Engine(OPTIONS) as engine:
    print("ready", flush=True)
    try:
        WORK
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(engine.generate("Hello", SamplingParams(max_tokens=2)).finish_reason)
    print(engine.server_info()["pages"]["in_use"])
"""


@pytest.mark.parametrize(
    "work",
    ["engine.generate('Hello', long)", "engine.generate(['Hello'] * 20, long)", "list(engine.stream('a', long))"],
)
def test_an_interrupt_aborts_what_runs(work: str) -> None:
    with Script(INTERRUPTED.replace("WORK", work)) as script:
        assert script.process.stdout
        assert script.process.stdout.readline() == "ready\n"
        time.sleep(1)
        script.process.send_signal(signal.SIGINT)
        status, out, err = script.end()
    assert (status, out) == (0, "interrupted\nlength\n0\n"), err
    assert "Traceback" not in err


def test_an_interrupt_while_starting_leaves_nothing() -> None:
    with Script("from dcprt import Engine\nEngine(OPTIONS)") as script:
        assert wait_until(lambda: any(role(pid) == "rank" for pid in with_tmpdir(script.tmpdir)), 60)
        script.process.send_signal(signal.SIGINT)
        status, _, err = script.end()
    assert status == -signal.SIGINT, err
    assert err.count("Traceback") == 1, err
    assert err.rstrip().endswith("KeyboardInterrupt"), err


def test_a_dead_worker_is_an_error_for_everybody() -> None:
    text = """
from dcprt import Engine, SamplingParams, errors
long = SamplingParams(max_tokens=1500, ignore_eos=True)
with Engine(OPTIONS) as engine:
    print("ready", flush=True)
    many, stream = ["Hello"] * 3, lambda: list(engine.stream("Hello"))
    for work in (lambda: engine.generate(many, long), stream, engine.server_info):
        try:
            work()
        except errors.RuntimeFailed as error:
            print(error)
"""
    with Script(text) as script:
        assert script.process.stdout
        assert script.process.stdout.readline() == "ready\n"
        time.sleep(1)
        os.kill(next(pid for pid in with_tmpdir(script.tmpdir) if role(pid) == "rank"), signal.SIGKILL)
        status, out, err = script.end()
    assert (status, out) == (0, "rank 0 ended unexpectedly (killed by signal 9)\n" * 3), err
    assert "Traceback" not in err
