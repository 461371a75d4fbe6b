"""Skips count as failures where everything is installed: KVAFFINITY_NO_SKIP=1, set by .ci/run."""

import os

import pytest
from hypothesis import settings

# time is asserted where a deadline is the behaviour, and machines are noisy
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", [])
    if skipped and os.environ.get("KVAFFINITY_NO_SKIP"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.ensure_newline()
        reporter.section("KVAFFINITY_NO_SKIP: skipping is failing", red=True)
        for report in skipped:
            reporter.write_line(f"{report.nodeid}: {report.longrepr[2]}")
