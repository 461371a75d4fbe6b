"""KV events on the wire: the bytes that a real vLLM sent, replay, and each way in which a feed can fail."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.lab.engine import Cleared, Event, Removed, Stored
from extproc.lab.kv_publisher import BUFFER_STEPS, END_OF_REPLAY, Faults, Feed, KvPublisher, encode
from extproc.lab.processes import free_ports
from tests.lab.subscriber import Cached, Subscriber

CAPTURES = Path(__file__).parents[3] / "shared" / "lab" / "captures"
BLOCK_TOKENS = 2
KEYS = [bytes([number]) * 32 for number in range(4)]

# What vLLM 0.32.0 published with blocks of 32 tokens; the last two of a server that tells its hashes whole.
CAPTURED = {
    "the first block of a prompt": (
        "93cb41dac347c50ccc1d918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf0b57266944d0"
        "4c77b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0020014c64cd029dcd0173cd01f546cd067d"
        "cd0499cd0543cd0117cd037ecd0117cd044acd02c946cd04f1cd1d00cd05d45acd0394cd039921cd044a15cd0f63cd03eecd"
        "0159cd0ab6cd069acd03c1cd1e64aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72"
        "615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64"
        "ae66756c6c5f617474656e74696f6e00"
    ),
    "one block behind another": (
        "93cb41dac347c4f40dc3918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfc4a8c967d62b"
        "e6dab1706172656e745f626c6f636b5f68617368cfe14c2d54b0aee2c3a9746f6b656e5f696473dc0020cd07c321cd02a6cd"
        "0878cd0117cd021e0f5a10cd015bcd0fdb46cd06bb0fcd011c13cd044a15cd0cd4cd0117cd0117cd0168cd02c9cd012615cd"
        "06f246cd02bc46cd017f46cd0261aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72"
        "615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64"
        "ae66756c6c5f617474656e74696f6e00"
    ),
    "blocks under a salt": (
        "93cb41dac347c5771b55918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657394cfd49e0c0be981"
        "8427cf500be301dc6681dacf3ee9d44c1228a3a5cffd31efb281b70c9db1706172656e745f626c6f636b5f68617368c0a974"
        "6f6b656e5f696473dc00800124cd0728cd013921cd059ecd030524cd016b13cd0117cd012dcd0c400f54cd1b6446cd0459cd"
        "0149cd045946cd0926cd0136cd0308cd08ddcd0137cd195515cd06770f50cd053bcd01d6cd0b6fcd012fcd0e4ecd030546cd"
        "019e15cd01e4cd0435cd12d0cd0337cd012dcd09015acd0161cd01b810cd0135cd012fcd012fcd012dcd0edbcd1650cd0161"
        "cd0117cd0147cd0140cd014ccd09b624cd040613cd03f746cd0568cd01f546cd067dcd0311cd049713cd0fdccd081810cd01"
        "47cd0183cd1b9a46cd0538cd01c0cd0276cd0209cd011c13cd051713cd1620cd018646cd1285cd060acd0ff8cd01cdcd0338"
        "cd0690cd0462cd013ccd03c6cd128bcd0149cd182b46cd122e46cd0e99cd015ecd03f746cd0568cd08fccd01f4cd062dcd01"
        "40cd012bcd020dcd015c4c154e15cd023d0fcd050c10cd0173aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d6564"
        "69756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739491a874656e616e742d31c0c0c0a967726f75705f"
        "69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
    ),
    "a reset": ("93cb41dac347c74a05b29181a474797065b0416c6c426c6f636b73436c656172656400"),
    "blocks of an adapter": (
        "93cb41dac347d97ec27d9584a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420d6ed8fec"
        "db1ea193e74b3c1a6c6a8f38da45677e500a6c2bc9e5c0eeabe17425a66d656469756da3475055a967726f75705f69647800"
        "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420bab5bb51d7a4bdee4d82fe92a54037"
        "fedd764547eb81f17c14e5187f92184cc0a66d656469756da3475055a967726f75705f6964780084a474797065ac426c6f63"
        "6b52656d6f766564ac626c6f636b5f68617368657391c420729a35025779dfd1f304d954e808e31507a211429ab4006af6bc"
        "37d03bf7b389a66d656469756da3475055a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c"
        "6f636b5f68617368657391c420bb9b928ff146e8721eaf3c4371ed26ba0a93ba92e3b678c33d31e245c4399f04a66d656469"
        "756da3475055a967726f75705f696478008ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657394c4"
        "20b5fb34dab5e6a79f5f00230e9af8e75f7bc7f345b70a861840e2c1783cd1eb8bc420adb2d2adf3ddb3fe3231c7dcbfc745"
        "cdd2d134a7c4f77ec9024cc7770fc0bb8bc420c4310da545536e7755db8d2c0919f1f7e925a5d8516597fb48a4d7033392f1"
        "d6c42058763b327aef1f30f28ed95e392c6e8b198d1f326cc9cda337450d263c4b3282b1706172656e745f626c6f636b5f68"
        "617368c0a9746f6b656e5f696473dc00800124cd0728cd013921cd059ecd030524cd016b13cd0117cd012dcd0c400f54cd1b"
        "6446cd0459cd0149cd045946cd0926cd0136cd0308cd08ddcd0137cd195515cd06770f50cd053bcd01d6cd0b6fcd012fcd0e"
        "4ecd030546cd019e15cd01e4cd0435cd12d0cd0337cd012dcd09015acd0161cd01b810cd0135cd012fcd012fcd012dcd0edb"
        "cd1650cd0161cd0117cd0147cd0140cd014ccd09b624cd040613cd03f746cd0568cd01f546cd067dcd0311cd049713cd0fdc"
        "cd081810cd0147cd0183cd1b9a46cd0538cd01c0cd0276cd0209cd011c13cd051713cd1620cd018646cd1285cd060acd0ff8"
        "cd01cdcd0338cd0690cd0462cd013ccd03c6cd128bcd0149cd182b46cd122e46cd0e99cd015ecd03f746cd0568cd08fccd01"
        "f4cd062dcd0140cd012bcd020dcd015c4c154e15cd023d0fcd050c10cd0173aa626c6f636b5f73697a6520a76c6f72615f69"
        "6401a66d656469756da3475055a96c6f72615f6e616d65a673716c626f74aa65787472615f6b6579739491a673716c626f74"
        "91a673716c626f7491a673716c626f7491a673716c626f74a967726f75705f69647800b26b765f63616368655f737065635f"
        "6b696e64ae66756c6c5f617474656e74696f6e00"
    ),
    "a block in the place of two": (
        "93cb41dac347d934fe279384a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420e1b60d13"
        "749b0d9c43ee9a624d4160eb9a9b1d01ea35f8595f755f71ba15352ca66d656469756da3475055a967726f75705f69647800"
        "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420045e175c93ea9e0214e164313a7475"
        "d5e3d915d15b6f24f0c4a8c967d62be6daa66d656469756da3475055a967726f75705f696478008ba474797065ab426c6f63"
        "6b53746f726564ac626c6f636b5f68617368657391c420f794e499e32684959bd6de4fd9642b33a13598ea27abe0070a9eec"
        "f030e836bbb1706172656e745f626c6f636b5f68617368c420bce1da052a289c127c6b97c1a57f44a1fc78b9295927cfb276"
        "527f89341ede86a9746f6b656e5f696473dc002046cd026146cd02060fcd02bc46cd017fcd0136cd0883cd0421cd0126cd01"
        "49cd042ecd09015acd0149cd02bf46cd05380fcd053810cd0268cd0140cd01f546cd067dcd0278cd0268cd024e0faa626c6f"
        "636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b657973"
        "91c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
    ),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_it_encodes_what_vllm_encoded_byte_for_byte(name: str) -> None:
    payload = bytes.fromhex(CAPTURED[name])
    assert again(payload) == with_short_hashes(payload)


def again(payload: bytes) -> bytes:
    """The batch as an engine would tell it, encoded anew."""
    at_s, events, rank = msgspec.msgpack.decode(payload)
    return encode([told(event) for event in events], at_s=at_s, rank=rank, block_tokens=32, adapters=("sqlbot",))


def told(event: dict[str, Any]) -> Event:
    keys = [key_of(engine_hash) for engine_hash in event.get("block_hashes", ())]
    match event["type"]:
        case "BlockStored":
            parent, lora, extra = event["parent_block_hash"], event["lora_name"], event["extra_keys"][0] or []
            return Stored(
                keys,
                None if parent is None else key_of(parent),
                array("I", event["token_ids"]).tobytes(),
                "".join(extra[bool(lora) :]),
                lora,
            )
        case "BlockRemoved":
            return Removed(keys[0])
    return Cleared()


def key_of(engine_hash: int | bytes) -> bytes:
    return engine_hash if isinstance(engine_hash, bytes) else engine_hash.to_bytes(32, "big")


def with_short_hashes(payload: bytes) -> bytes:
    """The same batch of a server that tells its hashes as numbers."""

    def short(value: Any) -> Any:
        if isinstance(value, bytes):
            return int.from_bytes(value[-8:], "big")
        if isinstance(value, list):
            return [short(each) for each in value]
        return {key: short(each) for key, each in value.items()} if isinstance(value, dict) else value

    return msgspec.msgpack.encode(short(msgspec.msgpack.decode(payload)))


def captured(name: str) -> list[dict[str, Any]]:
    """A file of recorded messages and requests; none where there is no such file."""
    path = CAPTURES / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_it_encodes_every_recorded_message_byte_for_byte() -> None:
    names = ("vllm_kv_events.jsonl", "vllm_kv_events_dp.jsonl", "vllm_kv_events_restart.jsonl")
    for record in (record for name in names for record in captured(name) if record["type"] == "kv_event"):
        payload = bytes.fromhex(record["payload_hex"])
        if b"session_id" not in payload:  # what a request may say of itself; these are as it wants
            assert again(payload) == with_short_hashes(payload)


def test_the_reader_of_these_tests_is_right_about_what_a_real_vllm_had_cached() -> None:
    records = captured("vllm_kv_events.jsonl")
    for pod in {record["pod"] for record in records}:
        timeline = [record for record in records if record["pod"] == pod and record["type"] in ("kv_event", "request")]
        timeline.sort(key=lambda record: record["decoded"][0] if record["type"] == "kv_event" else record["sent_ts"])
        cached = Cached(32)
        for record in timeline:
            if record["type"] == "kv_event":
                cached.take(bytes.fromhex(record["payload_hex"]))
            elif not record["label"].startswith(("burst", "n_2")):  # these ran while others did
                body = record["body"]
                lora = None if body["model"] == "tiny" else body["model"]
                expected, _ = cached.expect(record["prompt_token_ids"], salt=body.get("cache_salt"), lora=lora)
                assert expected == record["usage"]["prompt_tokens_details"]["cached_tokens"], record["label"]


def test_adapter_and_salt_are_extra_keys_the_salt_of_the_first_block_alone() -> None:
    tokens = bytes(4 * BLOCK_TOKENS * 2)
    salted = Stored(KEYS[:2], None, tokens, "mine", None)
    adapted = Stored(KEYS[:2], None, tokens, "mine", "b")
    later = Stored(KEYS[2:], KEYS[1], tokens, "mine", "b")
    _, events, _ = msgspec.msgpack.decode(
        encode([salted, adapted, later], at_s=1.0, rank=0, block_tokens=BLOCK_TOKENS, adapters=("a", "b"))
    )
    assert [(event["lora_id"], event["lora_name"], event["extra_keys"]) for event in events] == [
        (None, None, [["mine"], None]),
        (2, "b", [["b", "mine"], ["b"]]),
        (2, "b", [["b"], ["b"]]),
    ]


def feed(**changes: Any) -> Feed:
    events, replay = free_ports(2)
    return Feed(**{"endpoint": address(events), "replay_endpoint": address(replay), "topic": "kv@n1@tiny", **changes})


def address(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


@asynccontextmanager
async def publishing(**changes: Any) -> AsyncGenerator[tuple[KvPublisher, Subscriber]]:
    """A publisher and someone who listens to it."""
    async with (
        KvPublisher(made := feed(**changes), block_tokens=BLOCK_TOKENS) as publisher,
        Subscriber(made) as subscriber,
    ):
        await subscriber.connected(lambda: publisher.publish([Cleared()]))
        yield publisher, subscriber


def seqs(messages: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(message[-2], "big") for message in messages]


async def received(subscriber: Subscriber, since: int) -> list[int]:
    """The numbers of all messages that come, counted from `since`."""
    messages = []
    while (message := await subscriber.next(0.2)) is not None:
        messages.append(message)
    return [seq - since for seq in seqs(messages)]


@pytest.mark.parametrize("connect", [False, True])
async def test_a_message_is_topic_number_and_batch(connect: bool) -> None:
    async with publishing(connect=connect) as (publisher, subscriber):
        seq = publisher.next_seq
        publisher.publish([Removed(KEYS[1])])
        topic, number, payload = await subscriber.next(5.0) or []
    assert (topic, number) == (b"kv@n1@tiny", seq.to_bytes(8, "big"))
    at_s, events, rank = msgspec.msgpack.decode(payload)
    assert at_s > 1.7e9
    assert events == [{"type": "BlockRemoved", "block_hashes": [0x0101010101010101], "medium": "GPU", "group_idx": 0}]
    assert rank == 0


async def test_a_replay_has_the_same_bytes_from_where_it_is_asked_for() -> None:
    async with publishing() as (publisher, subscriber):
        since = publisher.next_seq
        for key in KEYS:
            publisher.publish([Removed(key)])
        live = [await subscriber.next(5.0) for _ in KEYS]
        assert await subscriber.replay(since) == [[b"", *(message or [])] for message in live]
        assert await subscriber.replay(since + 2) == [[b"", *(message or [])] for message in live[2:]]
        assert len(await subscriber.replay(0)) == since + len(KEYS)
        assert await subscriber.replay(1_000_000) == []


async def test_the_buffer_keeps_the_last_batches_and_a_replay_of_all_of_them_arrives() -> None:
    async with publishing() as (publisher, subscriber):
        while publisher.next_seq < BUFFER_STEPS + 5:
            publisher.publish([Cleared()])
        assert seqs(await subscriber.replay(0)) == [*range(5, BUFFER_STEPS + 5)]


async def test_what_is_no_request_for_replay_is_passed_over() -> None:
    async with publishing() as (publisher, subscriber):
        context = zmq.asyncio.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(str(publisher.feed.replay_endpoint))
            for frames in ([b""], [b"", b"", b""], [b"x"]):
                await dealer.send_multipart(frames)
            await dealer.send_multipart([b"", (1 << 40).to_bytes(8, "big")])
            async with asyncio.timeout(5.0):
                assert await dealer.recv_multipart() == [b"", b"", END_OF_REPLAY, b""]
        context.destroy(linger=0)
        assert len(await subscriber.replay(0)) == publisher.next_seq


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("ok", [0, 1, 2, 3, 4]),
        ("cut", []),
        ("duplicate", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        ("reorder", [1, 0, 3, 2]),
        ("delay", []),
    ],
)
async def test_a_broken_feed_is_seen_live_and_not_in_its_replay(fault: Any, seen: list[int]) -> None:
    async with publishing() as (publisher, subscriber):
        since = publisher.next_seq
        publisher.faults = Faults(events=fault)
        for _ in range(5):
            publisher.publish([Cleared()])
        assert await received(subscriber, since) == seen
        assert [seq - since for seq in seqs(await subscriber.replay(since))] == [0, 1, 2, 3, 4]


async def test_what_is_late_comes_in_order_and_at_once_when_the_feed_is_mended() -> None:
    async with publishing() as (publisher, subscriber):
        since = publisher.next_seq
        publisher.faults = Faults(events="delay", delay_s=0.3)
        for _ in range(3):
            publisher.publish([Cleared()])
        assert await subscriber.next(0.1) is None
        assert seqs([await subscriber.next(5.0) or [] for _ in range(3)]) == [since, since + 1, since + 2]
        publisher.faults = Faults(events="delay", delay_s=60.0)
        publisher.publish([Cleared()])
        publisher.publish([Cleared()])
        publisher.faults = Faults()
        publisher.publish([Cleared()])
        assert await received(subscriber, since) == [3, 4, 5]


async def test_a_batch_that_nothing_overtakes_comes_in_the_end() -> None:
    async with publishing() as (publisher, subscriber):
        publisher.faults = Faults(events="reorder")
        publisher.publish([Cleared()])
        assert await subscriber.next(0.2) is None
        assert await subscriber.next(5.0) is not None


async def test_a_gap_is_there_in_every_replay_until_that_is_mended() -> None:
    async with publishing() as (publisher, subscriber):
        since = publisher.next_seq
        for fault in ("ok", "cut", "ok"):
            publisher.faults = Faults(events=fault, replay="gap")  # type: ignore[arg-type]
            publisher.publish([Cleared()])
        assert await received(subscriber, since) == [0, 2]
        for _ in range(2):
            assert [seq - since for seq in seqs(await subscriber.replay(since))] == [0, 2]
        publisher.faults = Faults()
        assert [seq - since for seq in seqs(await subscriber.replay(since))] == [0, 1, 2]


async def test_a_replay_that_is_refused_never_comes() -> None:
    async with publishing() as (publisher, subscriber):
        publisher.faults = Faults(replay="refuse")
        with pytest.raises(TimeoutError):
            await subscriber.replay(0, within_s=0.2)
        publisher.faults = Faults()
        assert len(await subscriber.replay(0)) == publisher.next_seq


async def test_an_address_that_is_taken_is_named_and_is_free_again_after_the_end() -> None:
    made = feed()
    async with KvPublisher(made, block_tokens=BLOCK_TOKENS):
        with pytest.raises(ValueError, match=r"cannot bind tcp://127\.0\.0\.1:\d+: Address"):
            await KvPublisher(made, block_tokens=BLOCK_TOKENS).__aenter__()
    async with KvPublisher(made, block_tokens=BLOCK_TOKENS):
        pass


async def test_nothing_is_sent_after_the_end() -> None:
    async with KvPublisher(feed(), block_tokens=BLOCK_TOKENS) as publisher:
        publisher.faults = Faults(events="delay", delay_s=0.0)
        publisher.publish([Cleared()])
    publisher.publish([Cleared()])
    publisher.faults = Faults()
    publisher.publish([Cleared()])
    assert publisher.next_seq == 3


def test_ranks_are_told_apart_by_their_ports() -> None:
    made = Feed("tcp://*:5557", "tcp://127.0.0.1:5600", "t")
    assert made.of_rank(0) == made
    assert made.of_rank(2) == Feed("tcp://*:5559", "tcp://127.0.0.1:5602", "t")
    assert Feed("ipc:///tmp/a").of_rank(0) == Feed("ipc:///tmp/a")
    with pytest.raises(ValueError, match="only a TCP port"):
        Feed("ipc:///tmp/a").of_rank(1)
