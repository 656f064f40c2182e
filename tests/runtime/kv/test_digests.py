"""Digests of blocks, against hashlib by hand."""

from __future__ import annotations

import hashlib
import struct

import pytest

from optkit.runtime.kv.digests import SECRET_BYTES, DigestChain, new_secret


def test_a_digest_is_the_hash_of_the_digest_before_and_the_tokens() -> None:
    secret = bytes(range(SECRET_BYTES))
    root = hashlib.sha256(secret + b"tenant").digest()
    first = hashlib.sha256(root + struct.pack("<3I", 1, 2, 3)).digest()
    second = hashlib.sha256(first + struct.pack("<3I", 4, 5, 6)).digest()
    chain = DigestChain(3, secret)
    assert chain.extend("tenant", [1, 2, 3, 4, 5, 6, 7], []) == [first, second]
    assert chain.extend("tenant", [9, 9, 9, 4, 5, 6], [first]) == [first, second], "known digests are kept"
    assert chain.extend("", [1, 2, 3], []) != [first]


def test_chains_of_a_secret_agree_and_others_do_not() -> None:
    secret = new_secret()
    assert DigestChain(2, secret).root("a") == DigestChain(2, secret).root("a")
    assert DigestChain(2).root("a") != DigestChain(2).root("a")


@pytest.mark.parametrize("length", [0, 16, 33])
def test_a_secret_has_a_fixed_length(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        DigestChain(2, bytes(length))
