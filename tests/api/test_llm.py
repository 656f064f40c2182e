"""A loaded model: the answers of transformers, by every function; options, errors, and the end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import optkit
from optkit.api.optimize import OptimizeResult
from optkit.api.progress import ProgressEvent
from optkit.serve.openai.defaults import SamplingDefaults
from tests.support.tiny_tokenizer import TEMPLATE, fast_tokenizer

PROMPTS = ["hello there", "the cat sat on the mat", "How are you doing today? The end"]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()


def greedy(reference: Any, ids: list[int], count: int) -> list[int]:
    """The tokens of transformers."""
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return out[0, len(ids) :].tolist()


def text_of(ids: list[int]) -> str:
    """The text without a character that the end of the answer cuts."""
    return fast_tokenizer().decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


def encoded(text: str) -> list[int]:
    return fast_tokenizer().encode(text, add_special_tokens=False).ids


def test_generate_gives_the_tokens_of_transformers_for_texts_and_token_ids(
    llm: optkit.LLM, reference: Any
) -> None:
    expected = [greedy(reference, encoded(prompt), 12) for prompt in PROMPTS]
    answers = llm.generate(PROMPTS, max_tokens=12, **GREEDY)
    assert [list(answer.token_ids) for answer in answers] == expected
    by_ids = llm.generate([encoded(prompt) for prompt in PROMPTS], max_tokens=12, **GREEDY)
    assert [answer.token_ids for answer in by_ids] == [answer.token_ids for answer in answers]
    assert [answer.text for answer in answers] == [text_of(ids) for ids in expected]
    assert [(answer.prompt, answer.finish_reason) for answer in answers] == [(p, "length") for p in PROMPTS]
    alone = llm.generate(PROMPTS[0], max_tokens=12, **GREEDY)
    assert alone.choices == answers[0].choices and str(alone) == alone.text
    assert alone.ttft_seconds > 0 and alone.cached_tokens < len(encoded(PROMPTS[0]))


def test_chat_renders_the_template_and_several_conversations_run_together(
    llm: optkit.LLM, reference: Any
) -> None:
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    expected = greedy(reference, encoded(text), 8)
    messages = [{"role": "user", "content": "hello"}]
    answer = llm.chat(messages, max_tokens=8, **GREEDY)
    assert list(answer.token_ids) == expected and answer.prompt == text
    both = llm.chat([messages, messages], max_tokens=8, **GREEDY)
    assert [one.token_ids for one in both] == [answer.token_ids] * 2
    assert llm.chat("hello", max_tokens=8, **GREEDY).token_ids == answer.token_ids
    assert "im_start" in TEMPLATE


def test_stream_gives_the_answer_in_pieces(llm: optkit.LLM) -> None:
    whole = llm.generate(PROMPTS[0], max_tokens=24, **GREEDY)
    pieces = list(llm.stream(PROMPTS[0], max_tokens=24, **GREEDY))
    assert "".join(map(str, pieces)) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len(pieces) > 1
    messages = [{"role": "user", "content": "hello"}]
    chat = "".join(map(str, llm.stream(messages, max_tokens=8, **GREEDY)))
    assert chat == llm.chat(messages, max_tokens=8, **GREEDY).text


def test_a_stream_that_is_left_early_ends_the_generation(llm: optkit.LLM) -> None:
    stream = llm.stream(PROMPTS[0], max_tokens=900, **GREEDY)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 60
    while llm._engine.client.stats.num_running and time.monotonic() < deadline:
        llm.generate("a", max_tokens=1)
    assert llm._engine.client.stats.num_running == 0


def test_logprobs_are_those_of_transformers(llm: optkit.LLM, reference: Any) -> None:
    for scored, text in zip(llm.logprobs(PROMPTS, top=2), PROMPTS, strict=True):
        ids = encoded(text)
        with torch.no_grad():
            rows = reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        expected = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored.values).double(), expected, atol=2e-5, rtol=1e-5)
        assert [token.token_id for token in scored.tokens] == ids and scored.text == text
        assert scored.tokens[0].logprob is None
        assert scored.perplexity == pytest.approx(float((-expected.mean()).exp()), rel=1e-4)
        likely = [[token for token, _, _ in score.top] for score in scored.tokens[1:]]
        assert likely == rows[:-1].topk(2).indices.tolist()
    single = llm.logprobs(PROMPTS[0])
    assert single.total == pytest.approx(sum(single.values))


def test_generate_reports_logprobs_of_the_answer(llm: optkit.LLM, reference: Any) -> None:
    ids = encoded(PROMPTS[0])
    answer = llm.generate(PROMPTS[0], max_tokens=4, logprobs=1, **GREEDY)
    with torch.no_grad():
        rows = reference(torch.tensor([[*ids, *answer.token_ids]])).logits[0].double().log_softmax(-1)
    for position, score in enumerate(answer.logprobs):
        assert score.logprob == pytest.approx(float(rows[len(ids) - 1 + position, score.token_id]), abs=2e-5)
        assert score.top[0][0] == score.token_id
    chat = llm.chat("hello", max_tokens=3, logprobs=0, **GREEDY)
    assert [score.token_id for score in chat.logprobs] == list(chat.token_ids)


def test_options_are_those_of_the_http_api(llm: optkit.LLM) -> None:
    plain = llm.generate(PROMPTS[0], max_tokens=24, **GREEDY).text
    stop = plain[3:5]
    stopped = llm.generate(PROMPTS[0], max_tokens=24, stop=(stop,), **GREEDY)
    assert stopped.text == plain[: plain.index(stop)] and stopped.finish_reason == "stop"
    several = llm.generate(PROMPTS[0], max_tokens=6, n=3, temperature=1.0, seed=7)
    again = llm.generate(PROMPTS[0], max_tokens=6, n=3, temperature=1.0, seed=7)
    assert several.choices == again.choices and len({choice.token_ids for choice in several.choices}) == 3
    token = encoded(" the")[0]
    assert set(llm.generate("a", max_tokens=3, logit_bias={token: 100}, **GREEDY).token_ids) == {token}


def test_beam_search_gives_the_beams_of_transformers(llm: optkit.LLM, reference: Any) -> None:
    ids = encoded(PROMPTS[0])
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([ids]),
            max_new_tokens=8,
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            eos_token_id=None,
        )
    options: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 8, "ignore_eos": True}
    found = llm.generate(PROMPTS[0], **options).choices
    assert [list(choice.token_ids) for choice in found] == out[:, len(ids) :].tolist()
    pieces = list(llm.stream(PROMPTS[0], **options))
    assert [piece.token_ids for piece in pieces] == [choice.token_ids for choice in found]


def test_best_of_returns_the_likeliest_answers(llm: optkit.LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    every = llm.generate(PROMPTS[0], n=5, logprobs=0, **options).choices
    ranked = sorted(
        every, key=lambda choice: sum(score.logprob or 0 for score in choice.logprobs), reverse=True
    )
    found = llm.generate(PROMPTS[0], n=2, best_of=5, **options).choices
    assert [choice.token_ids for choice in found] == [choice.token_ids for choice in ranked[:2]]
    assert not found[0].logprobs  # nobody asked for them
    with pytest.raises(optkit.UserError, match="best_of"):
        llm.stream(PROMPTS[0], best_of=5)


def test_a_callback_that_calls_its_own_model_is_refused_and_waits_for_nothing(llm: optkit.LLM) -> None:
    def again(_event: ProgressEvent) -> None:
        llm.generate("a", max_tokens=1)

    with pytest.raises(optkit.EngineError, match="progress callback"):
        llm.generate("a", max_tokens=1, progress=again)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_token": 3}, "unknown option 'max_token'. did you mean 'max_tokens'?"),
        ({"stream": True}, "unknown option 'stream'"),
        ({"temperature": 9}, "'temperature': Input should be less than or equal to 2"),
        ({"max_tokens": 2000}, "maximum context length is 1024 tokens"),
        ({"logit_bias": {10_000: 1.0}}, "10000 is not a token id"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens is 9"),
    ],
)
def test_wrong_options_are_user_errors(llm: optkit.LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(optkit.UserError) as error:
        llm.generate("hello", **arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("prompts", [3, None, ["a", 3], [[1, "a"]], [1.5], {"a": 1}, [{"role": "user"}]])
def test_a_prompt_is_a_text_or_token_ids(llm: optkit.LLM, prompts: Any) -> None:
    with pytest.raises(optkit.UserError, match="a prompt is a text or a list of token ids"):
        llm.generate(prompts)
    with pytest.raises(optkit.UserError, match="a conversation is a list of messages"):
        llm.chat(7)  # type: ignore[arg-type]


def test_a_stream_is_of_a_single_prompt(llm: optkit.LLM) -> None:
    with pytest.raises(optkit.UserError, match="a stream is of a single prompt"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]


def test_no_prompts_give_no_answers_and_wrong_ones_are_named(llm: optkit.LLM) -> None:
    assert llm.generate([]) == [] and llm.logprobs([]) == []
    with pytest.raises(optkit.UserError, match="the prompt is empty"):
        llm.generate(["fine", ""])
    for call in (llm.generate, llm.chat, llm.logprobs):
        with pytest.raises(optkit.UserError, match="surrogate"):
            call("a\ud800")
    with pytest.raises(optkit.UserError, match="role"):
        llm.chat([{"role": "nobody", "content": "x"}])


def test_progress_counts_the_answers(llm: optkit.LLM) -> None:
    events: list[ProgressEvent] = []
    llm.generate(PROMPTS, max_tokens=2, progress=events.append)
    assert [event.part for event in events] == [(1, 3), (2, 3), (3, 3)]


def test_threads_share_a_loaded_model(llm: optkit.LLM) -> None:
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = llm.generate(PROMPTS[number % 3], max_tokens=8, **GREEDY).token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number] == found[number % 3] for number in range(6))


def test_pictures_of_results_are_escaped_tables(llm: optkit.LLM) -> None:
    html = llm.generate(["<b>"], max_tokens=2, **GREEDY)._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html
    assert "1024 tokens" in llm._repr_html_() and "LLM tiny" in repr(llm)
    assert "perplexity" in llm.logprobs("hello there")._repr_html_()


def test_a_closed_model_has_no_process_and_answers_nothing(result: OptimizeResult) -> None:
    defaults = SamplingDefaults(temperature=0, max_new_tokens=3)
    with pytest.MonkeyPatch.context() as patch:  # the model's own file has none
        patch.setattr("optkit.api.llm.read_defaults", lambda directory: defaults)
        llm = result.load(max_num_seqs=2)
    assert llm.info.config.max_num_seqs == 2
    assert len(llm.generate("a").token_ids) == 3
    stream = llm.stream("a", max_tokens=900, ignore_eos=True)
    next(stream)
    pid = llm.info.pid
    llm.close()
    llm.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(optkit.EngineError):  # a stream that was cut does not look like a whole one
        list(stream)
    for call in (lambda: llm.generate("a"), lambda: next(llm.stream("a"))):
        with pytest.raises(optkit.EngineError, match="closed"):
            call()


FORGETFUL = """
import sys, optkit
llm = optkit.load(sys.argv[1])
print(llm.generate("a", max_tokens=4, guided_regex="[ab]{2}", seed=1).text)
stream = llm.stream("a", max_tokens=900)
next(stream)
"""


def test_a_program_that_forgets_to_close_ends_quietly_and_leaves_no_process(result: OptimizeResult) -> None:
    pytest.importorskip("llguidance")
    command = [sys.executable, "-c", FORGETFUL, str(result.artifact)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert len(program.stdout.readline().strip()) == 2
        processes = psutil.Process(program.pid).children(recursive=True)
        out, errors = program.communicate(timeout=60)
    assert (program.returncode, out, errors) == (0, "", "")
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_a_dead_engine_is_an_error_of_the_call(result: OptimizeResult) -> None:
    with optkit.load(result.artifact) as llm:
        stream = llm.stream(PROMPTS[0], max_tokens=900, **GREEDY)
        next(stream)
        psutil.Process(llm.info.pid).kill()
        with pytest.raises(optkit.EngineError, match="the engine died"):
            list(stream)
        with pytest.raises(optkit.EngineError, match="load the model again"):
            llm.generate("a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 2}, "did you mean 'max_num_seqs'"),
        ({"kv_cache_bytes": "1 elephant"}, "kv_cache_bytes: a size is a number of bytes"),
        ({"max_model_len": 4096}, "the model's context is 1024 tokens"),
        ({"generation_config": "non"}, "did you mean 'none'"),
    ],
)
def test_load_refuses_wrong_options(result: OptimizeResult, options: dict[str, Any], message: str) -> None:
    with pytest.raises(optkit.UserError) as error:
        optkit.load(result.artifact, **options)
    assert message in str(error.value)


def test_load_refuses_what_is_no_artifact_and_leaves_no_process(model: Path, tmp_path: Path) -> None:
    before = psutil.Process().children(recursive=True)
    for place in (model, tmp_path / "absent"):
        with pytest.raises(optkit.UserError):
            optkit.load(place)
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_embed_gives_the_hidden_states_of_transformers(llm: optkit.LLM, reference: Any, pooling: Any) -> None:
    texts = [*PROMPTS, "a" * 90]
    expected = []
    for text in texts:
        with torch.no_grad():
            states = reference(torch.tensor([encoded(text)]), output_hidden_states=True).hidden_states[-1][0]
        expected.append({"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling])
    events: list[ProgressEvent] = []
    found = llm.embed(texts, pooling=pooling, normalize=False, progress=events.append)
    torch.testing.assert_close(torch.tensor(np.asarray(found)), torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert found.num_tokens == tuple(len(encoded(text)) for text in texts)
    assert events[-1].part == (4, 4)
    unit = llm.embed(texts, pooling=pooling)
    assert np.allclose(np.linalg.norm(unit.vectors, axis=1), 1)
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(unit.vectors), torch.stack(expected))
    assert cosines.min() > 0.9999
    assert np.allclose(unit.similarity(), unit.vectors @ unit.vectors.T, atol=1e-6)
    assert np.allclose(llm.embed(encoded(PROMPTS[0]), pooling=pooling)[0], unit[0], atol=1e-6)


def test_embed_runs_beside_a_stream_and_refuses_what_does_not_fit(llm: optkit.LLM) -> None:
    whole = llm.generate(PROMPTS[0], max_tokens=60, **GREEDY).text
    stream = llm.stream(PROMPTS[0], max_tokens=60, **GREEDY)
    pieces = [next(stream).text]
    llm.embed(PROMPTS)
    assert "".join([*pieces, *map(str, stream)]) == whole
    with pytest.raises(optkit.UserError, match="a text of 1025 tokens"):
        llm.embed([[5] * 1025])
    with pytest.raises(optkit.UserError, match="token 4000 is not in the vocabulary"):
        llm.embed([[4000]])
    with pytest.raises(optkit.UserError, match="a text of 0 tokens"):
        llm.embed("")
    with pytest.raises(optkit.UserError, match="unknown pooling 'max'"):
        llm.embed("a", pooling="max")  # type: ignore[arg-type]
    assert len(llm.embed([])) == 0


TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def test_an_answer_keeps_to_a_constraint(llm: optkit.LLM) -> None:
    pytest.importorskip("llguidance")
    answer = llm.generate(
        "the", max_tokens=20, temperature=1.0, seed=3, structured_outputs={"regex": "(ab|ba){3}"}
    )
    assert re.fullmatch("(ab|ba){3}", answer.text) and answer.finish_reason == "stop"


def test_a_required_call_is_read_from_the_answer_whole_and_in_pieces(llm: optkit.LLM) -> None:
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 120,
        "temperature": 0,
    }
    answer = llm.chat("paint it", parallel_tool_calls=False, **options)
    assert isinstance(answer, optkit.Completion)
    (call,) = answer.tool_calls
    assert call.name == "paint" and json.loads(call.arguments)["colour"] in ("red", "blue")
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    messages = [{"role": "user", "content": "paint it"}]
    *pieces, last = llm.stream(messages, parallel_tool_calls=False, **options)
    assert [(c.name, c.arguments) for c in last.tool_calls] == [(call.name, call.arguments)]
    assert not any(piece.tool_calls or piece.text for piece in pieces)
