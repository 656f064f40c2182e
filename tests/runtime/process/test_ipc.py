"""Messages between the processes: frames, and a misspelt option, which is an error on the receiving side, too."""

from __future__ import annotations

import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.process import ipc
from optkit.runtime.process.launch import launch
from optkit.runtime.types import TokenOutput
from tests.support.engine_process import FACTORY, request
from tests.support.fakes import fake_engine


def load_message(**options: object) -> bytes:
    body = msgspec.msgpack.encode({"type": "load", "artifact_dir": "", "options": options})
    return ipc.HEADER.pack(len(body)) + body


def test_a_load_message_with_options_is_read() -> None:
    [message] = ipc.FrameReader().feed(load_message(max_num_seqs=3))
    assert isinstance(message, ipc.Load)
    assert message.options.max_num_seqs == 3


@pytest.mark.parametrize("options", [{"max_num_seq": 3}, {"max_num_seqs": 0}, {"ttft_slo_ms": "700"}])
def test_a_load_message_with_a_misspelt_or_wrong_option_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ipc.ProtocolError):
        ipc.FrameReader().feed(load_message(**options))


def test_a_worker_that_is_sent_a_misspelt_option_ends_with_an_error() -> None:
    """A real engine process, written to by hand."""
    process, sock = launch(FACTORY).take()
    try:
        sock.sendall(load_message(max_num_seq=3))
        message = ipc.from_worker.decode(received(sock))
    finally:
        sock.close()
        process.kill()
        process.wait()
    assert isinstance(message, ipc.Failed)
    assert "max_num_seq" in message.what


def received(sock: socket.socket) -> bytes:
    """The body of one frame."""
    sock.settimeout(120.0)
    with sock.makefile("rb") as stream:
        return stream.read(ipc.body_length(stream.read(ipc.HEADER.size)))


def test_info_of_an_engine_survives_the_border() -> None:
    info = fake_engine().info()
    assert ipc.from_worker.decode(ipc.frame(ipc.Ready(info))[ipc.HEADER.size :]) == ipc.Ready(info)
    unknown = msgspec.msgpack.encode({"type": "ready", "info": msgspec.to_builtins(info) | {"max_len": 1}})
    with pytest.raises(msgspec.ValidationError, match="max_len"):
        ipc.from_worker.decode(unknown)


@given(st.lists(st.integers(1, 40)), st.lists(st.integers(0, 99), min_size=1, max_size=5))
def test_frames_survive_any_cut(cuts: list[int], prompts: list[int]) -> None:
    messages: list[ipc.ToWorker] = [request(f"r{i}", [i] * 9) for i in prompts]
    messages += [ipc.Abort("r"), ipc.Shutdown()]
    data = b"".join(ipc.frame(message) for message in messages)
    reader, received = ipc.FrameReader(), []
    for cut in cuts:
        received += reader.feed(data[:cut])
        data = data[cut:]
    assert received + reader.feed(data) == messages


def test_frames_that_are_too_large_or_no_message_are_refused() -> None:
    with pytest.raises(ipc.ProtocolError, match="larger than"):
        ipc.FrameReader().feed(ipc.HEADER.pack(ipc.MAX_FRAME + 1))
    with pytest.raises(ipc.ProtocolError, match="larger than"):
        ipc.frame(ipc.Abort("x" * ipc.MAX_FRAME))
    for body in (b"\xc1", ipc._encoder.encode({"type": "ready"}), ipc._encoder.encode({"type": "abort"})):
        with pytest.raises(ipc.ProtocolError):
            ipc.FrameReader().feed(ipc.HEADER.pack(len(body)) + body)


def test_the_secret_of_a_deployment_is_in_no_text_and_arrives() -> None:
    secret = b"0123456789abcdef0123456789abcdef"
    message = ipc.Load("artifact", EngineOptions(), secret)
    assert "0123" not in repr(message) and "0123" not in str(message)
    (read,) = ipc.FrameReader().feed(ipc.frame(message))
    assert isinstance(read, ipc.Load) and read.cache_secret == secret


@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.integers(0, 70_000), st.data())
def test_tokens_written_into_a_frame_arrive(names: list[str], preempted: int, data: st.DataObject) -> None:
    mark = 2**31 - 1
    outputs = [TokenOutput(request_id=name, token_ids=(mark,), num_preemptions=preempted) for name in names]
    frame, places = ipc.frame_with_places(tuple(outputs), mark)
    tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(names), max_size=len(names)))
    written = bytearray(frame)
    for place, token in zip(places, tokens, strict=True):
        written[place : place + 4] = token.to_bytes(4, "big")
    wanted = tuple(
        TokenOutput(request_id=name, token_ids=(token,), num_preemptions=preempted)
        for name, token in zip(names, tokens, strict=True)
    )
    assert ipc.from_worker.decode(bytes(written[ipc.HEADER.size :])) == wanted


def test_places_are_of_outputs_with_one_wide_token_each() -> None:
    for found, token in (((5,), 5), ((), 2**31 - 1), ((2**31 - 1, 2**31 - 1), 2**31 - 1)):
        with pytest.raises(ValueError, match="each output must have the token"):
            ipc.frame_with_places((TokenOutput(request_id="r", token_ids=found),), token)
