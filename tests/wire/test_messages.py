"""Our protobuf against envoy-data-plane's, which shares no line of code and no package name with it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from reference import ProcessingModeBodySendMode, accesslog, accesslog_service, core, ext_proc, protobuf, types

from extproc.core.types import End, Outcome
from extproc.wire import access_log, envoy_pb2, messages

# a field that Envoy announces as deprecated and still sends
pytestmark = pytest.mark.filterwarnings("ignore:AccessLogCommon.intermediate_log_entry is deprecated")

THEIRS: dict[str, type] = {
    "AccessLogCommon": accesslog.AccessLogCommon,
    "Address": core.Address,
    "BodyMutation": ext_proc.BodyMutation,
    "BodyResponse": ext_proc.BodyResponse,
    "CommonResponse": ext_proc.CommonResponse,
    "HeaderMap": core.HeaderMap,
    "HeaderMutation": ext_proc.HeaderMutation,
    "HeaderValue": core.HeaderValue,
    "HeaderValueOption": core.HeaderValueOption,
    "HeadersResponse": ext_proc.HeadersResponse,
    "HttpAccessLogEntries": accesslog_service.StreamAccessLogsMessageHttpAccessLogEntries,
    "HttpAccessLogEntry": accesslog.HttpAccessLogEntry,
    "HttpBody": ext_proc.HttpBody,
    "HttpHeaders": ext_proc.HttpHeaders,
    "HttpResponseProperties": accesslog.HttpResponseProperties,
    "HttpStatus": types.HttpStatus,
    "HttpTrailers": ext_proc.HttpTrailers,
    "ImmediateResponse": ext_proc.ImmediateResponse,
    "Metadata": core.Metadata,
    "ProcessingRequest": ext_proc.ProcessingRequest,
    "ProcessingResponse": ext_proc.ProcessingResponse,
    "ProtocolConfiguration": ext_proc.ProtocolConfiguration,
    "ResponseFlags": accesslog.ResponseFlags,
    "SocketAddress": core.SocketAddress,
    "StreamAccessLogsMessage": accesslog_service.StreamAccessLogsMessage,
    "StreamAccessLogsResponse": accesslog_service.StreamAccessLogsResponse,
    "StreamedBodyResponse": ext_proc.StreamedBodyResponse,
    "TrailersResponse": ext_proc.TrailersResponse,
}
"""Message of envoy.proto to its counterpart."""

_GOOGLE = {"Struct": protobuf.Struct, "Value": protobuf.Value, "ListValue": protobuf.ListValue}
_STATUS_CODES = [int(each) for each in types.StatusCode if each]


def test_every_message_of_the_proto_has_a_counterpart() -> None:
    assert set(envoy_pb2.DESCRIPTOR.message_types_by_name) == set(THEIRS)


# ---- any message, both ways ----


def theirs(ours: Any) -> Any:
    """The same content built with envoy-data-plane's own constructors, field by field and by name."""
    made = {}
    for field, value in ours.ListFields():
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            entries = {key: value[key] for key in value}
            nested = kind.fields_by_name["value"].message_type is not None
            made[field.name] = {key: theirs(each) if nested else each for key, each in entries.items()}
        elif kind is None:
            made[field.name] = list(value) if field.is_repeated else value
        elif field.is_repeated:
            made[field.name] = [theirs(each) for each in value]
        else:
            made[field.name] = theirs(value)
    name = ours.DESCRIPTOR.name
    if name == "Duration":
        return ours.ToTimedelta()
    if name == "UInt32Value":
        return ours.value
    return (THEIRS | _GOOGLE)[name](**made)


_TEXT = st.text("aZ09 -é", max_size=6)
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats(-1e9, 1e9) | _TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=4,
)


def _scalar(field: Any) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([each.number for each in field.enum_type.values])
    if field.containing_type.name == "HttpStatus":
        return st.sampled_from(_STATUS_CODES)
    return {
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_STRING: _TEXT,
        field.TYPE_BYTES: st.binary(max_size=6),
        field.TYPE_UINT32: st.integers(0, 2**32 - 1),
        field.TYPE_UINT64: st.integers(0, 2**64 - 1),
    }[field.type]


def _fill(draw: Any, message: Any) -> None:
    name = message.DESCRIPTOR.name
    if name == "Struct":
        message.update(draw(st.dictionaries(_TEXT, _JSON, max_size=2)))
        return
    if name == "Duration":
        message.FromMicroseconds(draw(st.integers(0, 10**12)))
        return
    if name == "UInt32Value":
        message.value = draw(st.integers(0, 2**32 - 1))
        return
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        value = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            for key in draw(st.lists(_TEXT, max_size=2)):
                if kind.fields_by_name["value"].message_type is None:
                    value[key] = draw(_TEXT)
                else:
                    _fill(draw, value[key])
        elif kind is None and not field.is_repeated:
            setattr(message, field.name, draw(_scalar(field)))
        elif kind is None:
            value.extend(draw(st.lists(_scalar(field), max_size=2)))
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, 2))):
                _fill(draw, value.add())
        else:
            value.SetInParent()
            _fill(draw, value)


@st.composite
def filled(draw: Any, kind: type) -> Any:
    message = kind()
    _fill(draw, message)
    return message


@pytest.mark.parametrize("name", sorted(THEIRS))
@examples(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_what_we_write_means_the_same_to_them_and_what_they_write_the_same_to_us(name: str, data: Any) -> None:
    kind = getattr(envoy_pb2, name)
    ours = data.draw(filled(kind))
    same = theirs(ours)
    assert THEIRS[name].parse(ours.SerializeToString()) == same
    assert kind.FromString(bytes(same)) == ours


@pytest.mark.parametrize("name", [field.name for field in envoy_pb2.ResponseFlags.DESCRIPTOR.fields])
def test_each_response_flag_stands_for_the_flag_of_its_name(name: str) -> None:
    read = envoy_pb2.ResponseFlags.FromString(bytes(accesslog.ResponseFlags(**{name: True})))
    assert [(field.name, value) for field, value in read.ListFields()] == [(name, True)]


@pytest.mark.parametrize("mode", ProcessingModeBodySendMode)
def test_each_body_mode_has_the_number_that_envoy_gives_it(mode: ProcessingModeBodySendMode) -> None:
    sent = ext_proc.ProcessingRequest(
        protocol_config=ext_proc.ProtocolConfiguration(
            request_body_mode=mode, send_body_without_waiting_for_header_response=True
        )
    )
    read = envoy_pb2.ProcessingRequest.FromString(bytes(sent)).protocol_config
    assert envoy_pb2.ProtocolConfiguration.BodySendMode.Name(read.request_body_mode) == mode.name
    assert read.send_body_without_waiting_for_header_response


# ---- our replies, as Envoy reads them ----


def read_by_envoy(reply: bytes) -> ext_proc.ProcessingResponse:
    return ext_proc.ProcessingResponse.parse(reply)


@pytest.mark.parametrize("in_body", [False, True])
def test_a_route_overwrites_its_headers_removes_the_others_and_hands_over_the_metadata(in_body: bool) -> None:
    reply = read_by_envoy(
        messages.mutate(
            (("x-upstream-cluster", "node-1"), ("x-dest", "10.0.0.1:8000,10.0.0.2:8000")), ("x-other",), in_body
        )
        + messages.metadata("t-1", 0.75)
    )
    answered, other = (reply.request_body, reply.request_headers)[:: 1 if in_body else -1]
    assert other is None
    assert answered is not None
    common = answered.response
    assert common is not None
    assert common.clear_route_cache is True
    assert common.status == ext_proc.CommonResponseResponseStatus.CONTINUE
    assert common.body_mutation is None
    mutation = common.header_mutation
    assert mutation is not None
    assert mutation.remove_headers == ["x-other"]
    assert [
        (each.header and each.header.key, each.header and each.header.raw_value, each.header and each.header.value)
        for each in mutation.set_headers
    ] == [("x-upstream-cluster", b"node-1", ""), ("x-dest", b"10.0.0.1:8000,10.0.0.2:8000", "")]
    assert {each.append_action for each in mutation.set_headers} == {
        core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    }
    assert reply.dynamic_metadata is not None
    assert reply.dynamic_metadata.to_dict() == {"kvaffinity": {"ticket": "t-1", "locality": 0.75}}


@pytest.mark.parametrize("in_body", [False, True])
def test_passing_on_removes_the_routing_headers_and_chooses_the_route_anew(in_body: bool) -> None:
    reply = read_by_envoy(messages.mutate((), ("x-a", "x-b"), in_body))
    answered = reply.request_body if in_body else reply.request_headers
    assert answered == (ext_proc.BodyResponse if in_body else ext_proc.HeadersResponse)(
        response=ext_proc.CommonResponse(
            header_mutation=ext_proc.HeaderMutation(remove_headers=["x-a", "x-b"]), clear_route_cache=True
        )
    )
    assert reply.dynamic_metadata is None


def test_a_rejection_is_an_answer_of_its_own_with_json_and_a_time_to_come_back() -> None:
    answer = read_by_envoy(messages.reject(503, b'{"error":1}', retry_after_s=1)).immediate_response
    assert answer is not None
    assert answer.status == types.HttpStatus(code=types.StatusCode.ServiceUnavailable)
    assert answer.body == b'{"error":1}'
    assert answer.details == "kvaffinity_no_node"
    assert answer.headers is not None
    assert {each.header.key: each.header.raw_value for each in answer.headers.set_headers if each.header} == {
        "content-type": b"application/json",
        "retry-after": b"1",
    }


def test_letting_headers_and_trailers_go_on_changes_nothing_in_them() -> None:
    assert read_by_envoy(messages.CONTINUE_HEADERS) == ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse()
    )
    assert read_by_envoy(messages.echo_trailers()) == ext_proc.ProcessingResponse(
        request_trailers=ext_proc.TrailersResponse()
    )


@given(
    size=st.sampled_from([0, 1, 61_999, 62_000, 62_001, 124_000, 124_001, 200_000]) | st.integers(0, 300_000),
    end=st.booleans(),
)
@examples(max_examples=60, deadline=None)
def test_an_echo_is_the_body_byte_for_byte_in_pieces_that_fit_and_ends_once_at_its_end(size: int, end: bool) -> None:
    body = bytes(i % 251 for i in range(size))
    pieces = []
    for reply in messages.echo_body(body, end=end):
        answered = read_by_envoy(reply).request_body
        assert answered is not None
        assert answered.response is not None
        assert answered.response.body_mutation is not None
        piece = answered.response.body_mutation.streamed_response
        assert piece is not None
        pieces.append(piece)
    assert b"".join(each.body for each in pieces) == body
    assert all(len(each.body) <= 62_000 for each in pieces)
    assert [each.end_of_stream for each in pieces] == [False] * (len(pieces) - 1) + [end]


# ---- what Envoy writes, as we read it ----


def test_headers_are_read_from_raw_values_and_from_plain_ones() -> None:
    sent = ext_proc.ProcessingRequest(
        request_headers=ext_proc.HttpHeaders(
            headers=core.HeaderMap(
                headers=[core.HeaderValue(key=":path", raw_value=b"/v1"), core.HeaderValue(key="x-old", value="v")]
            ),
            end_of_stream=True,
        )
    )
    read = envoy_pb2.ProcessingRequest.FromString(bytes(sent)).request_headers
    assert [(each.key, each.value, each.raw_value) for each in read.headers.headers] == [
        (":path", "", b"/v1"),
        ("x-old", "v", b""),
    ]
    assert read.end_of_stream


def logged(
    *,
    code: int = 200,
    flags: accesslog.ResponseFlags | None = None,
    tags: dict[str, str] | None = None,
    address: tuple[str, int] | None = ("10.0.0.7", 8000),
    attempts: int = 1,
    ticket: Any = "t-1",
    namespace: str = "kvaffinity",
) -> accesslog.HttpAccessLogEntry:
    """An entry as Envoy writes it, with more fields than we read."""
    return accesslog.HttpAccessLogEntry(
        common_properties=accesslog.AccessLogCommon(
            sample_rate=1.0,
            downstream_remote_address=core.Address(socket_address=core.SocketAddress(address="9.9.9.9", port_value=1)),
            upstream_remote_address=None
            if address is None
            else core.Address(socket_address=core.SocketAddress(address=address[0], port_value=address[1])),
            upstream_cluster="node-7",
            response_flags=flags,
            metadata=core.Metadata(
                filter_metadata={
                    "envoy.other": protobuf.Struct.from_dict({"ticket": "not ours"}),
                    namespace: protobuf.Struct.from_dict({"ticket": ticket, "locality": 0.5}),
                }
            ),
            custom_tags=tags or {},
            duration=timedelta(seconds=1, microseconds=250_000),
            upstream_request_attempt_count=attempts,
            access_log_type=accesslog.AccessLogType.DownstreamEnd,
        ),
        request=accesslog.HttpRequestProperties(request_id="r", path="/v1/chat/completions"),
        response=accesslog.HttpResponseProperties(response_code=code, response_body_bytes=10, response_headers_bytes=3),
    )


def outcomes(*entries: accesslog.HttpAccessLogEntry) -> list[tuple[str, Outcome]]:
    sent = accesslog_service.StreamAccessLogsMessage(
        identifier=accesslog_service.StreamAccessLogsMessageIdentifier(log_name="kvaffinity"),
        http_logs=accesslog_service.StreamAccessLogsMessageHttpAccessLogEntries(log_entry=list(entries)),
    )
    return list(access_log.outcomes(envoy_pb2.StreamAccessLogsMessage.FromString(bytes(sent))))


STREAMED = {"ttft_us": "305000", "engine_ttft_us": "300500", "content_type": "text/event-stream; charset=utf-8"}
WHOLE = {**STREAMED, "content_type": "application/json"}
NOTHING = {"ttft_us": "-", "engine_ttft_us": "-", "content_type": "-"}
LEFT = accesslog.ResponseFlags(downstream_connection_termination=True)
RESET = accesslog.ResponseFlags(downstream_remote_reset=True)
REFUSED = accesslog.ResponseFlags(upstream_connection_failure=True)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (logged(tags=STREAMED), Outcome(End.SERVED, "10.0.0.7:8000", True, 0.305, 0.3005, 1.25, 1)),
        (logged(tags=WHOLE), Outcome(End.SERVED, "10.0.0.7:8000", True, 0.305, None, 1.25, 1)),
        (logged(tags=STREAMED, attempts=3), Outcome(End.SERVED, "10.0.0.7:8000", True, 0.305, 0.3005, 1.25, 3)),
        (logged(tags=STREAMED, flags=LEFT), Outcome(End.CUT, "10.0.0.7:8000", True, 0.305, 0.3005, 1.25, 1)),
        (logged(tags=NOTHING, flags=RESET, code=0), Outcome(End.CUT, "10.0.0.7:8000", False, None, None, 1.25, 1)),
        (logged(tags=NOTHING, flags=LEFT, address=None, attempts=0), Outcome(End.CUT, None, False, None, None, 1.25)),
        (logged(tags=WHOLE, code=400), Outcome(End.SERVED, "10.0.0.7:8000", False, 0.305, None, 1.25, 1)),
        (logged(tags=WHOLE, code=500), Outcome(End.FAILED, "10.0.0.7:8000", False, 0.305, None, 1.25, 1)),
        (logged(tags=NOTHING, code=503, flags=REFUSED), Outcome(End.FAILED, "10.0.0.7:8000", False, None, None, 1.25)),
        (logged(tags=NOTHING, code=0), Outcome(End.FAILED, "10.0.0.7:8000", False, None, None, 1.25)),
        (logged(tags={}, address=("fd00::7", 80)), Outcome(End.SERVED, "[fd00::7]:80", False, None, None, 1.25)),
    ],
    ids=lambda value: f"{value.end}" if isinstance(value, Outcome) else None,
)
def test_an_entry_of_the_access_log_says_how_the_request_ended(
    entry: accesslog.HttpAccessLogEntry, expected: Outcome
) -> None:
    assert outcomes(entry) == [("t-1", expected)]


def test_entries_without_a_ticket_of_ours_are_none_of_our_business() -> None:
    elsewhere = logged(namespace="envoy.rival")
    assert outcomes(elsewhere, accesslog.HttpAccessLogEntry(), logged(tags=STREAMED))[0][0] == "t-1"
    assert len(outcomes(elsewhere, accesslog.HttpAccessLogEntry(), logged(tags=STREAMED))) == 1


def test_where_the_reply_came_too_late_envoys_name_of_the_request_may_be_a_ticket() -> None:
    left = logged(tags={**NOTHING, "request": "name-1"}, namespace="envoy.rival", flags=LEFT, code=0, address=None)
    assert outcomes(left) == [("name-1", Outcome(End.CUT, None, False, None, None, 1.25, routed=False))]
    both = logged(tags={**STREAMED, "request": "name-1"})
    ((ticket, outcome),) = outcomes(both)
    assert (ticket, outcome.routed) == ("t-1", True)


def test_an_entry_of_a_request_that_still_runs_settles_nothing() -> None:
    running = logged(tags=STREAMED)
    assert running.common_properties is not None
    running.common_properties.intermediate_log_entry = True
    assert outcomes(running) == []


def test_a_message_without_http_entries_has_no_outcomes() -> None:
    tcp = accesslog_service.StreamAccessLogsMessageTcpAccessLogEntries()
    sent = accesslog_service.StreamAccessLogsMessage(tcp_logs=tcp)
    assert list(access_log.outcomes(envoy_pb2.StreamAccessLogsMessage.FromString(bytes(sent)))) == []
