"""Settings of all tests, and what they count."""

import os
from collections.abc import Iterator

import pytest
import torch
from corpus import make_prepared
from toy import TIES

from bothways.data.corpus import Prepared

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: it then runs kernels on a CPU


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the models are tiny: a second thread only waits, and other processes want the core


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TIES.compared:
        near = ", ".join(f"{gap:.1e}" for gap in TIES.allowed)
        terminalreporter.write_line(
            f"search results compared: {TIES.compared}; differing by a near-tie: {len(TIES.allowed)}"
            + (f" (deciding candidates apart by {near})" if near else "")
        )


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A tiny corpus, prepared once (see corpus.py)."""
    return make_prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As on a machine with two cores, on which two workers decode."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
