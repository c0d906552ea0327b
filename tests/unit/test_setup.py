"""What an installation stands on: exact pins that every build of a package can meet, for everything we ask for."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = [line for line in LINES if line and not line.startswith("#")]
OPEN = {"triton"}  # a build of torch for a GPU brings the very version that it was made with
REQUIRED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]


def pinned() -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in (pin.split("==") for pin in PINS)}


@pytest.mark.parametrize("pin", PINS)
def test_pin_is_exact_and_has_no_local_version(pin: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin), f"{pin} must have the form name==version"
    assert Version(pin.partition("==")[2]).local is None


def test_every_package_is_pinned_once() -> None:
    assert len(pinned()) == len(PINS)


@pytest.mark.parametrize("requirement", REQUIRED)
def test_dependency_is_pinned_within_its_range(requirement: str) -> None:
    wanted = Requirement(requirement)
    assert wanted.specifier, f"{requirement} must say which versions will do"
    assert wanted.name in OPEN or wanted.specifier.contains(pinned()[canonicalize_name(wanted.name)])


def test_no_accelerator_packages_are_pinned() -> None:
    assert [name for name in pinned() if name.startswith(("nvidia", "cuda", *OPEN))] == []


def test_one_interpreter_bound_everywhere() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    assert "(3, 11)" in (ROOT / "Makefile").read_text(encoding="utf-8")
