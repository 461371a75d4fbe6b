"""Envoy's access log to tickets and outcomes."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.core.types import End, Outcome
from extproc.wire.envoy_pb2 import HttpAccessLogEntry, StreamAccessLogsMessage
from extproc.wire.messages import METADATA_NAMESPACE

TTFT_TAG = "ttft_us"
ENGINE_TTFT_TAG = "engine_ttft_us"
NAME_TAG = "request"
CONTENT_TYPE_TAG = "content_type"


def outcomes(message: StreamAccessLogsMessage) -> Iterator[tuple[str, Outcome]]:
    """(ticket id, outcome) of each finished request that has a ticket of ours, or may have one.

    A reply that took effect left the ticket in the metadata. Where it came too late there is only Envoy's name of the
    request, which is the ticket's id if there is a ticket: such an outcome is not `routed`.
    """
    for entry in message.http_logs.log_entry:
        common = entry.common_properties
        if common.intermediate_log_entry:
            continue
        fields = common.metadata.filter_metadata
        # reading a missing key of a protobuf map would add it
        ours = fields[METADATA_NAMESPACE].fields if METADATA_NAMESPACE in fields else {}
        if "ticket" in ours:
            yield ours["ticket"].string_value, _outcome(entry, routed=True)
        elif name := common.custom_tags.get(NAME_TAG):
            yield name, _outcome(entry, routed=False)


def _outcome(entry: HttpAccessLogEntry, *, routed: bool) -> Outcome:
    common = entry.common_properties
    flags, tags = common.response_flags, common.custom_tags
    code = entry.response.response_code.value
    ttft_s = _seconds(tags.get(TTFT_TAG))
    streamed = tags.get(CONTENT_TYPE_TAG, "").startswith("text/event-stream")
    if flags.downstream_connection_termination or flags.downstream_remote_reset:
        end = End.CUT
    elif 100 <= code < 500:
        end = End.SERVED
    else:
        end = End.FAILED
    upstream = common.upstream_remote_address.socket_address
    return Outcome(
        end=end,
        served_by=_address(upstream.address, upstream.port_value) if upstream.address else None,
        # a body that the node began: Envoy's own error pages have no first byte from upstream
        answered=ttft_s is not None and code < 400,
        client_ttft_s=ttft_s,
        engine_ttft_s=_seconds(tags.get(ENGINE_TTFT_TAG)) if streamed else None,
        total_s=common.duration.ToNanoseconds() / 1e9 if common.HasField("duration") else None,
        attempts=max(1, common.upstream_request_attempt_count),
        routed=routed,
    )


def _seconds(microseconds: str | None) -> float | None:
    """Envoy writes "-" for what did not happen."""
    return int(microseconds) / 1e6 if microseconds is not None and microseconds.isdecimal() else None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
