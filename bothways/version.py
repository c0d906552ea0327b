"""Which program this is: what reports, manifests and `--version` say of it."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path


def version() -> str:
    """The installed version, or `source` where the package is only a folder of files."""
    try:
        return installed("bothways")
    except PackageNotFoundError:
        return "source"


def program() -> dict[str, str]:
    """Version, a digest of the package's source files, and the versions of what numbers depend on most."""
    root = Path(__file__).parent
    code = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        code.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    versions = {"python": platform.python_version(), "torch": installed("torch")}
    return {"bothways": version(), "code": code.hexdigest()[:16], **versions}
