"""Where kernels are taken, and what is said where they are not."""

from collections.abc import Iterator

import pytest
import torch

from bothways import kernels

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That nothing is wrong with."""
    kernels.why_not.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "find_spec", lambda _: object())
    monkeypatch.setattr(kernels.shutil, "which", lambda name: "/bin/gcc" if name == "gcc" else None)
    monkeypatch.setattr(kernels.Path, "exists", lambda _: True)
    yield
    kernels.why_not.cache_clear()


def test_nothing_keeps_a_whole_system_from_kernels() -> None:
    assert kernels.why_not(GPU) is None


def test_a_cpu_takes_none() -> None:
    assert not kernels.usable(torch.zeros(1))


@pytest.mark.parametrize(
    "owner, name, value, said",
    [
        (torch.version, "cuda", None, "NVIDIA"),
        (torch.cuda, "get_device_capability", lambda _: (7, 5), "compute capability 8.0"),
        (kernels, "find_spec", lambda _: None, "triton is not installed"),
        (kernels.shutil, "which", lambda _: None, "neither gcc nor clang"),
        (kernels.Path, "exists", lambda _: False, "python3-dev"),
    ],
)
def test_what_is_missing_is_said(
    owner: object, name: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(owner, name, value)
    assert said in str(kernels.why_not(GPU))


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SWITCH, "0")
    assert kernels.why_not(GPU) == "BOTHWAYS_KERNELS=0 is set"
