"""Each peer in a virtual environment of its own: they bring scripts and packages that would get in each other's way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class NotInstalled(Exception):
    """The peer is not here and could not be installed; the message is pip's reason."""


def installed(requirements: Sequence[str], directory: Path) -> Path:
    """The Python of an environment that has just these requirements; made in `directory` when it is not there yet."""
    python, record = directory / "bin" / "python", directory / "requirements"
    wanted = "\n".join(requirements)
    if record.exists() and record.read_text() == wanted:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(directory))
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
    record.write_text(wanted)
    return python


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as failed:
        lines = (failed.stderr or failed.stdout).strip().splitlines() or [f"exit code {failed.returncode}"]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        raise NotInstalled((errors or lines)[-1]) from failed
    except OSError as failed:
        raise NotInstalled(str(failed)) from failed
