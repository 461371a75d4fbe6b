"""The images, built from this working tree once per session; tests are skipped where that cannot be done."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNAVAILABLE = 69  # docker/build: there is no base image to be had


@dataclass(frozen=True, slots=True)
class Images:
    kvaffinity: str = "kvaffinity:test"
    envoy: str = "kvaffinity-envoy:test"


@pytest.fixture(scope="session")
def images() -> Images:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("Docker does not answer: install it, start dockerd, see that `docker info` works")
    images = Images()
    tags = {"IMAGE": images.kvaffinity, "ENVOY_IMAGE": images.envoy, "PYTHON": sys.executable}
    build = subprocess.run([ROOT / "docker/build"], env=os.environ | tags, capture_output=True, text=True)
    if build.returncode == UNAVAILABLE:
        pytest.skip(f"no base image to build on: {build.stderr.splitlines()[-1]}")
    assert build.returncode == 0, build.stderr
    return images
