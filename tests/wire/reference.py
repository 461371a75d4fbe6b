"""envoy-data-plane's messages, under short names."""

import warnings

with warnings.catch_warnings():
    # pydantic 2.12 deprecates the form of the validators that are generated there
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.data.accesslog import v3 as accesslog
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
    from envoy_data_plane.envoy.service.accesslog import v3 as accesslog_service
    from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
    from envoy_data_plane.envoy.type import v3 as types
    from envoy_data_plane.google import protobuf

__all__ = ["ProcessingModeBodySendMode", "accesslog", "accesslog_service", "core", "ext_proc", "protobuf", "types"]
