"""Replies to Envoy: the only speller of ext_proc's protobuf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from extproc.wire.envoy_pb2 import CommonResponse, HeaderValueOption, ProcessingRequest, ProcessingResponse

NAME_HEADER = "x-kvaffinity-request"
"""Envoy's own name of a request, stamped before the client's headers are believed; it comes back in the access log also
where our reply never took effect, because the client had left."""

RETRY_HEADER = "x-envoy-retry-on"
"""Set where Envoy may repeat a request."""

METADATA_NAMESPACE = "kvaffinity"
"""Of the dynamic metadata; the filter must list it in `metadata_options.receiving_namespaces.untyped`."""

MAX_ECHO_BYTES = 62_000
"""Of one streamed body reply: Envoy's limit is 64 KiB with what is around it."""

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _common(response: ProcessingResponse, *, in_body: bool) -> CommonResponse:
    return response.request_body.response if in_body else response.request_headers.response


def route_to(
    headers: Mapping[str, str], *, remove: Sequence[str], metadata: Mapping[str, str | float], in_body: bool
) -> ProcessingResponse:
    """Set `headers`, remove those named in `remove`, choose the route anew, and hand `metadata` (if any) to the access
    log. `in_body`: the reply answers the body (BUFFERED), not the headers."""
    response = ProcessingResponse()
    common = _common(response, in_body=in_body)
    for key, value in headers.items():
        option = common.header_mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = key
        option.header.raw_value = value.encode("latin-1", "replace")
    common.header_mutation.remove_headers.extend(remove)
    common.clear_route_cache = True
    if not metadata:
        return response
    fields = response.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value.fields
    for key, entry in metadata.items():
        if isinstance(entry, str):
            fields[key].string_value = entry
        else:
            fields[key].number_value = entry
    return response


def reject(status: int, body: bytes, *, retry_after_s: int) -> ProcessingResponse:
    """Answer the client ourselves, with JSON."""
    response = ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = status
    for key, value in (("content-type", b"application/json"), ("retry-after", str(retry_after_s).encode())):
        option = answer.headers.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = key
        option.header.raw_value = value
    answer.body = body
    answer.details = "kvaffinity_no_node"
    return response


def continue_headers() -> ProcessingResponse:
    """BUFFERED: let the headers go on, so that the body is sent to us."""
    response = ProcessingResponse()
    response.request_headers.SetInParent()
    return response


def echo_body(body: bytes, *, end: bool) -> Iterator[ProcessingResponse]:
    """FULL_DUPLEX_STREAMED: hand back a piece of the body, byte for byte."""
    for at in range(0, max(len(body), 1), MAX_ECHO_BYTES):
        piece = body[at : at + MAX_ECHO_BYTES]
        response = ProcessingResponse()
        streamed = response.request_body.response.body_mutation.streamed_response
        streamed.body = piece
        streamed.end_of_stream = end and at + MAX_ECHO_BYTES >= len(body)
        yield response


def echo_collected(chunks: Sequence[bytes], complete: bool, trailers: bool) -> Iterator[ProcessingResponse]:
    """FULL_DUPLEX_STREAMED: hand back what was collected before the decision. `complete`: the body ended, and with
    `trailers` if so."""
    ends = complete and not trailers
    for chunk in chunks[:-1]:
        yield from echo_body(chunk, end=False)
    if chunks or ends:
        yield from echo_body(chunks[-1] if chunks else b"", end=ends)
    if complete and trailers:
        yield echo_trailers()


def echo_trailers() -> ProcessingResponse:
    """FULL_DUPLEX_STREAMED: let the trailers go on."""
    response = ProcessingResponse()
    response.request_trailers.SetInParent()
    return response


def echo(message: ProcessingRequest) -> Iterator[ProcessingResponse]:
    """FULL_DUPLEX_STREAMED: hand back a message that came after the decision."""
    if message.HasField("request_trailers"):
        yield echo_trailers()
    else:
        yield from echo_body(message.request_body.body, end=message.request_body.end_of_stream)
