"""Messages between ranks: arrays and types arrive unchanged, and a closed socket is seen at once."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from optkit.runtime.ranks import messages
from optkit.runtime.ranks.messages import Allocate, Failed, Load, Loaded, RankGone, Step


def test_messages_arrive_in_order_and_unchanged() -> None:
    arrays = {
        "input_ids": np.arange(70_000),
        "block_tables": np.zeros((2, 3), np.int32),
        "none": np.empty(0, np.int64),
    }
    sent = [Load("a", 1, 2, 1, False, "m", "tensor_parallel"), Allocate(9, 32, (0, 8)), Step.of(arrays)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in sent:
            data = messages.frame(message)
            ours.settimeout(10)
            writer = threading.Thread(target=messages.send, args=(ours, data))
            writer.start()
            found = messages.TO_RANK.decode(messages.receive(theirs))
            writer.join()
            assert found == message
    assert isinstance(found, Step)
    for name, array in found.arrays().items():
        assert (
            array.dtype == arrays[name].dtype
            and np.array_equal(array, arrays[name])
            and array.flags.writeable
        )


def test_answers_arrive_unchanged() -> None:
    for answer in (Loaded(5), Failed("what", None, "fix")):
        assert messages.FROM_RANK.decode(messages.frame(answer)[messages.LENGTH.size :]) == answer


def test_a_closed_socket_is_seen_on_both_sides() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        with pytest.raises(RankGone):
            messages.receive(theirs)
        with pytest.raises(RankGone):
            messages.send(theirs, b"x" * 1_000_000)
