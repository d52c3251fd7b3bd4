"""SGLang's `/generate`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dcprt.tokenizer.text import TextCodec

from .server import Server
from .stream import Background, events, open_stream

STORY = "Once upon a time"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def ask(server: Server, **body: Any) -> Any:
    response = server.post("/generate", {"sampling_params": GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server: Server, **body: Any) -> dict[str, Any]:
    """The error that a wrong request gets."""
    response = server.post("/generate", {"sampling_params": GREEDY, **body})
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def test_the_shape_of_an_answer(server: Server, codec: TextCodec) -> None:
    answer = ask(server, text=STORY, rid="mine")
    meta = answer["meta_info"]
    assert answer["text"] == codec.decode(answer["output_ids"])
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == len(codec.encode(STORY))
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 6
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["e2e_latency"] > 0


def test_token_ids_are_the_same_prompt(server: Server, codec: TextCodec) -> None:
    assert ask(server, input_ids=codec.encode(STORY))["output_ids"] == ask(server, text=STORY)["output_ids"]


@pytest.mark.parametrize("kind", ["text", "input_ids"])
def test_a_batch_answers_in_order(server: Server, codec: TextCodec, kind: str) -> None:
    texts = [STORY, "One, two, three, four,", STORY]
    prompts = texts if kind == "text" else [codec.encode(text) for text in texts]
    answers = ask(server, **{kind: prompts}, rid=["a", "b", "c"])
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]
    assert answers[0]["output_ids"] == answers[2]["output_ids"]
    assert answers[1]["output_ids"] == ask(server, text=texts[1])["output_ids"]


def test_a_batch_of_one_is_a_list(server: Server) -> None:
    assert len(ask(server, text=[STORY])) == 1
    assert refusal(server, text=[])["param"] == "prompt"


def test_a_stream_has_everything_so_far(server: Server) -> None:
    whole = ask(server, text=STORY)
    seen = events(server, "/generate", {"text": STORY, "sampling_params": GREEDY})
    assert [len(event["output_ids"]) for event in seen] == list(range(1, 7))
    for before, after in itertools.pairwise(seen):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert (seen[-1]["text"], seen[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert seen[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_a_stream_of_a_batch_tells_the_index(server: Server) -> None:
    seen = events(server, "/generate", {"text": [STORY, "One, two,"], "sampling_params": GREEDY})
    ended = [event["index"] for event in seen if event["meta_info"]["finish_reason"]]
    assert sorted(ended) == [0, 1]


def test_the_end_token_ends_the_text(server: Server, codec: TextCodec) -> None:
    prompt = codec.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = server.generate(prompt, max_new_tokens=30)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": codec.eos_token_id}
    assert answer["text"] == "The capital of France is Paris."
    shown = server.generate(prompt, max_new_tokens=30, skip_special_tokens=False)
    assert shown["text"] == answer["text"]
    past = server.generate(prompt, max_new_tokens=12, ignore_eos=True, skip_special_tokens=False)
    assert past["output_ids"][:8] == answer["output_ids"]
    assert past["text"].startswith("The capital of France is Paris.<|im_end|>")


def test_stop_strings(server: Server) -> None:
    free = ask(server, text=STORY)
    stop = free["text"][4:9]
    answer = server.generate(STORY, max_new_tokens=6, stop=[stop])
    assert answer["text"] == free["text"][: free["text"].index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == free["output_ids"][: answer["meta_info"]["completion_tokens"]]
    assert server.settle()["pages"]["in_use"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": STORY, "input_ids": [1]}, "text"),
        ({"text": ""}, "prompt"),
        ({"input_ids": []}, "prompt"),
        ({"input_ids": [[]]}, "prompt"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [49152]}, "prompt"),
        ({"text": [STORY, ""]}, "prompt"),
        ({"text": [STORY], "rid": ["a", "b"]}, "rid"),
        ({"text": [STORY, STORY], "rid": ["a", "a"]}, "rid"),
        ({"text": STORY, "rid": 5}, "rid"),
        ({"text": STORY, "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"text": STORY, "sampling_params": {"max_new_tokens": -1}}, "sampling_params"),
        ({"text": STORY, "sampling_params": {"max_new_tokens": 9000}}, "max_tokens"),
        ({"text": STORY, "sampling_params": {"stop": [""]}}, "stop"),
    ],
)
def test_wrong_requests_are_refused(server: Server, body: dict[str, Any], param: str) -> None:
    assert refusal(server, **body)["param"] == param
    assert refusal(server, **body, stream=True)["param"] == param
    state = server.settle()
    assert state["pages"]["in_use"] == 0


def test_a_second_request_with_a_live_id_is_refused(server: Server) -> None:
    """S3: the first goes on."""
    first = Background(server, max_new_tokens=20, rid="twice")
    assert first.started.wait(60)
    assert "'twice'" in refusal(server, text=STORY, rid="twice")["message"]
    assert refusal(server, text=["Hello", STORY], rid=["other", "twice"])["param"] == "rid"
    assert first.join() == "events"
    assert ask(server, text=STORY, rid="twice")["meta_info"]["completion_tokens"] == 6
    assert server.settle()["pages"]["in_use"] == 0


def test_an_id_is_free_at_once_after_its_request(server: Server) -> None:
    """Whether that one ended, stopped or lost its client, nothing of it reaches the next."""
    prompts = [STORY, "One, two, three, four,"]
    texts = [ask(server, text=prompt)["text"] for prompt in prompts]
    stop = texts[0][3:6]
    for _ in range(2):
        body = {"text": prompts[0], "rid": "again", "sampling_params": {**GREEDY, "max_new_tokens": 500}}
        with open_stream(server, "/generate", body) as stream:
            next(stream)
        answer = server.post("/generate", {"text": prompts[1], "rid": "again", "sampling_params": GREEDY})
        if answer.status_code == 400:  # the server has not seen yet that the client is gone
            assert "running already" in answer.json()["error"]["message"]
            server.settle()
            continue
        assert answer.json()["text"] == texts[1]
        stopped = ask(server, text=prompts[0], rid="again", sampling_params={**GREEDY, "stop": stop})
        assert stopped["meta_info"]["finish_reason"]["matched"] == stop
        assert ask(server, text=prompts[1], rid="again")["text"] == texts[1]


def test_an_id_of_a_batch_is_free_before_the_batch_ends(server: Server) -> None:
    body = {
        "text": ["What?", STORY],
        "rid": ["short", "long"],
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "stop_token_ids": []},
    }
    first = server.generate("What?", max_new_tokens=12, ignore_eos=True)
    body["sampling_params"]["stop_token_ids"] = [first["output_ids"][1]]
    with open_stream(server, "/generate", body) as stream:
        for event in stream:
            if event and event["meta_info"]["id"] == "short" and event["meta_info"]["finish_reason"]:
                break
        next_one = Background(server, max_new_tokens=16, rid="short")
        for _ in stream:
            pass
    assert next_one.join() == "events"
