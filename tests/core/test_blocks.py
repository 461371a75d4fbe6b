"""Block hashes: equal prefix if and only if equal hash."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.blocks import TOKEN_BYTES, beginning, block_hashes, chain_blocks, extend
from extproc.core.types import HASH_BYTES

data = st.binary(max_size=400)
block_tokens = st.integers(1, 9)


def hashes(chain: bytes) -> list[bytes]:
    return [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]


@given(data, block_tokens)
def test_there_is_one_hash_for_each_full_block_and_none_for_the_tail(prompt: bytes, size: int) -> None:
    assert chain_blocks(block_hashes(prompt, block_tokens=size, salt=7)) == len(prompt) // (size * TOKEN_BYTES)


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60), block_tokens)
def test_two_chains_agree_exactly_as_far_as_their_prompts_do(head: bytes, a: bytes, b: bytes, size: int) -> None:
    block = size * TOKEN_BYTES
    one, two = head + a, head + b
    full = min(len(one), len(two)) // block
    same = 0
    while same < full and one[: (same + 1) * block] == two[: (same + 1) * block]:
        same += 1
    pairs = zip(
        hashes(block_hashes(one, block_tokens=size, salt=7)),
        hashes(block_hashes(two, block_tokens=size, salt=7)),
        strict=False,
    )
    assert [x == y for x, y in pairs] == [i < same for i in range(full)]


@given(data, block_tokens)
def test_another_salt_shares_no_hash(prompt: bytes, size: int) -> None:
    one = hashes(block_hashes(prompt, block_tokens=size, salt=7))
    two = hashes(block_hashes(prompt, block_tokens=size, salt=8))
    assert not set(one) & set(two)


@given(st.lists(st.binary(max_size=60), max_size=20), st.lists(block_tokens, min_size=1, max_size=3, unique=True))
def test_a_prompt_in_pieces_has_the_chains_of_the_whole_at_every_piece(pieces: list[bytes], sizes: list[int]) -> None:
    mark = beginning(7, sizes)
    chains = [b"" for _ in sizes]
    for i, piece in enumerate(pieces):
        mark, new = extend(mark, piece, sizes)
        chains = [chain + more for chain, more in zip(chains, new, strict=True)]
        so_far = b"".join(pieces[: i + 1])
        assert chains == [block_hashes(so_far, block_tokens=size, salt=7) for size in sizes]
        assert mark.length == len(so_far)
        assert len(mark.tail) == max(len(so_far) % (size * TOKEN_BYTES) for size in sizes)


@pytest.mark.parametrize("size", [1, 16, 64])
def test_the_first_block_alone_is_a_prefix_of_the_chain(size: int) -> None:
    prompt = bytes(range(256)) * 8
    one_block = prompt[: size * TOKEN_BYTES]
    assert block_hashes(prompt, block_tokens=size, salt=1).startswith(
        block_hashes(one_block, block_tokens=size, salt=1)
    )
