"""pytest plugin that records the kernels each test launched and the test's result, and writes them to a file.

    pytest tests -m gpu -n 6 --record-kernels FILE                  all tests: a new file
    pytest tests/moe/router -m gpu --record-kernels FILE --record-more  some, if only their kernels changed

Each worker of pytest-xdist sends its part to the process that started it, which writes the file. Kernels that tests
launch in processes of their own don't count.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import machine
from tests.helpers import gpu_record

PART = "kernels"


def add_options(parser: pytest.Parser) -> None:
    """Add the options that `make test-gpu` gives."""
    parser.addoption("--record-kernels", metavar="FILE", help="on a GPU: write which kernels ran, and how it ended")
    parser.addoption("--record-more", action="store_true", help="add to what --record-kernels FILE has")
    parser.addoption("--record-commit", metavar="HASH", help="what to call the commit; default: as git says")


def configure(config: pytest.Config) -> None:
    """Register the plugin if a file is requested."""
    path = config.getoption("--record-kernels")
    if path is None:
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError("--record-kernels: expected a machine with a GPU, found none")
    config.pluginmanager.register(Recorder(Path(path), config), "kernel-recorder")


class Recorder:
    """Counts per kernel; in the process that writes the file also those of all tests."""

    def __init__(self, path: Path, config: pytest.Config):
        from envoi.runtime import launch, prepared  # imported late: not all tests need Triton
        from tests.helpers.launches import watched

        self.path, self.config = path, config
        self.is_worker = hasattr(config, "workerinput")
        self.mine: dict[str, tuple[str, int, int]] = {}
        self.parts: list[dict[str, tuple[str, int, int]]] = [self.mine]
        self.found_by_key, self.forget_prepared = launch._compiled, prepared.clear
        self.current: dict[str, str] = {}
        self.failed_now = False
        self.passed, self.failed = 0, set[str]()
        self.watch: AbstractContextManager[None] = watched(self.note)
        self.watch.__enter__()

    def note(self, sha256: str, kernel: Any) -> None:
        """Record a launch by the current test."""
        self.current[sha256] = kernel.metadata.name

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Run one test, its fixtures included."""
        self.current, self.failed_now = {}, False
        self.found_by_key.clear()  # Triton doesn't see launches found here
        self.forget_prepared()
        result = yield
        for sha256, name in self.current.items():
            _, passed, failed = self.mine.get(sha256, (name, 0, 0))
            self.mine[sha256] = (name, passed + (not self.failed_now), failed + self.failed_now)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count results of this process's tests, and in the process that started the workers those of all."""
        self.failed_now |= report.failed
        if report.failed:
            self.failed.add(report.nodeid)
        self.passed += report.passed and report.when == "call"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Add an ended worker's part; a crashed worker has none, so kernels that it alone launched get no green run."""
        self.parts.append(getattr(node, "workeroutput", {}).get(PART, {}))

    def pytest_sessionfinish(self) -> None:
        """Send the part to the main process, or write the file."""
        if self.is_worker:
            self.config.workeroutput[PART] = self.mine  # pyright: ignore[reportAttributeAccessIssue]
            return
        record = self.record()
        if self.config.getoption("--record-more"):
            record = gpu_record.together(gpu_record.read(self.path), record)
        gpu_record.write(self.path, record)

    def pytest_unconfigure(self) -> None:
        """Stop observing launches."""
        self.watch.__exit__(None, None, None)

    def record(self) -> gpu_record.GpuRecord:
        """Return the whole run."""
        from envoi.runtime import triton_compat
        from tests.helpers.launches import ptxas_version

        major, minor = torch.cuda.get_device_capability()
        run = gpu_record.Run(
            gpu=torch.cuda.get_device_name(), arch=f"sm_{major}{minor}", torch=torch.__version__,
            triton=triton_compat.VERSION, ptxas=ptxas_version(),
            commit=self.config.getoption("--record-commit") or machine.commit(),
            passed=self.passed, failed=len(self.failed),
        )  # fmt: skip
        return gpu_record.GpuRecord((run,), gpu_record.merged(self.parts))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the file's path."""
        if not self.is_worker:
            terminalreporter.write_line(f"{len(gpu_record.merged(self.parts))} kernels recorded in {self.path}")
