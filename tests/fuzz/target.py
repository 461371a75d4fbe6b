"""A target for atheris, which looks for bytes that reach new lines: `python -m tests.fuzz.target -runs=100000`.

Wants `pip install atheris`. Any option of libFuzzer and any folder of bodies to start from may follow; without a folder
it starts from bodies that tests.fuzz.bodies makes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

try:
    import atheris
except ImportError:
    atheris = None

_SEEDS = 2000
_MOST_SEED_BYTES = 4096


class Target:
    """From bytes to blocks, for the pools with and without a tokenizer; anything but a refusal escapes."""

    def __init__(self) -> None:
        from tests.fuzz import apis, bodies, harness, measuring

        self._apis, self._bodies = apis, bodies
        self._runner = asyncio.Runner()
        self._findings = measuring.Findings()
        self._threads = measuring.Threads(self._findings)
        self._world = harness.World(self._findings, self._threads, harness.load())

    def case(self, data: bytes) -> Any:
        """The body is the front of `data`; what is chosen beside it are its last four bytes."""
        bodies, provider = self._bodies, atheris.FuzzedDataProvider(data)
        path = provider.PickValueInList(list(self._apis.PATHS))
        model = provider.PickValueInList(sorted(set(self._apis.MODELS)))
        encoding = provider.PickValueInList([None] * 12 + ["gzip", "deflate", "br", "zstd"])
        mode = provider.PickValueInList(list(bodies.BodyMode))
        body = provider.ConsumeBytes(provider.remaining_bytes()).replace(b'"MODEL"', f'"{model}"'.encode())
        headers = () if encoding is None else (("content-encoding", encoding),)
        return bodies.Case("target", path, body, headers, mode)

    def __call__(self, data: bytes) -> None:
        case = self.case(data)
        self._runner.run(self._world.send(case))
        if self._findings.faults:
            what, _ = self._findings.faults.pop()
            raise AssertionError(f"{what}: {case}\n{case.body!r}")

    def seeds(self, folder: Path) -> None:
        """Bodies to start from."""
        rng, apis = Random(1), self._apis
        for number in range(_SEEDS):
            path, parsed = apis.request(rng)
            body = apis.written(rng, {**parsed, "model": "MODEL"})[:_MOST_SEED_BYTES]
            chosen = bytes([rng.randrange(3), 0, rng.randrange(6), apis.PATHS.index(path)])
            (folder / str(number)).write_bytes(body + chosen)


def main() -> None:
    """Run libFuzzer with the arguments of the command line."""
    if atheris is None:
        raise SystemExit("the fuzzer is not installed: pip install atheris")
    with atheris.instrument_imports(include=["extproc"]):
        target = Target()
    with tempfile.TemporaryDirectory() as folder:
        arguments = list(sys.argv)
        if all(each.startswith("-") for each in arguments[1:]):
            target.seeds(Path(folder))
            arguments += [f"-artifact_prefix={tempfile.gettempdir()}/", folder]
        atheris.Setup(arguments, target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
