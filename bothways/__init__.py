"""Sequence-to-sequence generation in both directions at once.

from bothways import load, train

run = train("config.yaml", output="run/")
load("run/").translate(["A sentence."])[0].text
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bothways.experiment import train
    from bothways.translator import Translator

__all__ = ["Translator", "load", "train"]


def load(run: str, **options: Any) -> "Translator":
    """A trained run, ready to translate: `checkpoint`, `device`, `precision` and every search option."""
    from bothways.translator import Translator

    return Translator.open(run, **options)


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    if name == "train":
        return import_module("bothways.train")  # a package that can be called
    if name == "Translator":
        from bothways.translator import Translator

        return Translator
    raise AttributeError(f"module 'bothways' has no attribute {name!r}")
