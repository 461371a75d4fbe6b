"""Replies to Envoy: the only speller of ext_proc's protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from extproc.wire.envoy_pb2 import HeaderMutation, HeaderValueOption, ProcessingRequest, ProcessingResponse

NAME_HEADER = "x-kvaffinity-request"
"""Envoy's own name of a request, stamped before the client's headers are believed; it comes back in the access log also
where our reply never took effect, because the client had left."""

RETRY_HEADER = "x-envoy-retry-on"
"""Set where Envoy may repeat a request."""

RANK_HEADER = "x-data-parallel-rank"
"""Which rank of the engine at an address is to serve it (vLLM's name)."""

METADATA_NAMESPACE = "kvaffinity"
"""Of the dynamic metadata; the filter must list it in `metadata_options.receiving_namespaces.untyped`."""

MAX_ECHO_BYTES = 62_000
"""Of one streamed body reply: Envoy's limit is 64 KiB with what is around it."""

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


@lru_cache(maxsize=4096)
def mutate(headers: tuple[tuple[str, str], ...], remove: tuple[str, ...], in_body: bool) -> bytes:
    """Set `headers`, remove those named in `remove`, choose the route anew. `in_body`: the reply answers the body
    (BUFFERED), not the headers. The last 4,096 different ones are kept: one a node, or one a list of nodes."""
    response = ProcessingResponse()
    common = (response.request_body if in_body else response.request_headers).response
    _set(common.header_mutation, headers)
    common.header_mutation.remove_headers.extend(remove)
    common.clear_route_cache = True
    return response.SerializeToString()


def metadata(ticket: str, locality: float) -> bytes:
    """What comes back in the access log. To be put behind a `mutate`: protobuf joins what stands together."""
    response = ProcessingResponse()
    fields = response.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value.fields
    fields["ticket"].string_value = ticket
    fields["locality"].number_value = locality
    return response.SerializeToString()


def _set(mutation: HeaderMutation, headers: Iterable[tuple[str, str]]) -> None:
    for key, value in headers:
        option = mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = key
        option.header.raw_value = value.encode("latin-1", "replace")


def reject(status: int, body: bytes, *, retry_after_s: int) -> bytes:
    """Answer the client ourselves, with JSON."""
    response = ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = status
    _set(answer.headers, (("content-type", "application/json"), ("retry-after", str(retry_after_s))))
    answer.body = body
    answer.details = "kvaffinity_no_node"
    return response.SerializeToString()


CONTINUE_HEADERS = ProcessingResponse(request_headers={}).SerializeToString()
"""BUFFERED: let the headers go on, so that the body is sent to us."""


def echo_body(body: bytes, *, end: bool) -> Iterator[bytes]:
    """FULL_DUPLEX_STREAMED: hand back a piece of the body, byte for byte."""
    for at in range(0, max(len(body), 1), MAX_ECHO_BYTES):
        response = ProcessingResponse()
        streamed = response.request_body.response.body_mutation.streamed_response
        streamed.body = body[at : at + MAX_ECHO_BYTES]
        streamed.end_of_stream = end and at + MAX_ECHO_BYTES >= len(body)
        yield response.SerializeToString()


def echo_collected(chunks: Sequence[bytes], complete: bool, trailers: bool) -> Iterator[bytes]:
    """FULL_DUPLEX_STREAMED: hand back what was collected before the decision. `complete`: the body ended, and with
    `trailers` if so."""
    ends = complete and not trailers
    for chunk in chunks[:-1]:
        yield from echo_body(chunk, end=False)
    if chunks or ends:
        yield from echo_body(chunks[-1] if chunks else b"", end=ends)
    if complete and trailers:
        yield echo_trailers()


def echo_trailers() -> bytes:
    """FULL_DUPLEX_STREAMED: let the trailers go on."""
    return ProcessingResponse(request_trailers={}).SerializeToString()


def echo(message: ProcessingRequest) -> Iterator[bytes]:
    """FULL_DUPLEX_STREAMED: hand back a message that came after the decision."""
    if message.HasField("request_trailers"):
        yield echo_trailers()
    else:
        yield from echo_body(message.request_body.body, end=message.request_body.end_of_stream)
