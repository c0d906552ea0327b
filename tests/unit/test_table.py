"""tools/table.py: which settings a row is decoded with, and what is not done twice."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "tools" / "table.py"
RECIPES = FILE.parents[1] / "recipes" / "multi30k"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("table", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "table", module)  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def test_every_system_of_the_table_names_a_recipe_and_its_variants(table: Any) -> None:
    given = SimpleNamespace(table=RECIPES / "table.yaml", work=Path("runs"), average=5, option=[])
    systems = table.Job.read(given).systems
    assert all(entry.recipe.exists() for entry in systems.values())
    assert systems["transformer-r2l"].variants == [""]
    assert systems["no-interaction"].variants == ["", table.SELF]
    assert systems["rerank"].variants == ["", table.TUNED]
    assert systems["bift-fine-tuning-all"].variants == ["", table.SELF, table.TUNED, table.SELF + table.TUNED]


def test_rows_are_decoded_as_they_are_named(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    text = SimpleNamespace(source_lines=lambda: ["a", "b"], references=lambda: [["x y z w", "u v w x"]])
    model = SimpleNamespace(parameter_count=lambda: 7)
    outputs = [SimpleNamespace(text=line) for line in ("x y z w", "u v w x")]

    def open_translator(_: Path, **options: Any) -> Any:
        opened.append(options)
        return SimpleNamespace(translate=lambda _: outputs, model=model, rescores=options["rerank"] == "self")

    chosen = SimpleNamespace(length_penalty=1.3, rerank_weight=0.2, score=50.0)
    monkeypatch.setattr("bothways.translator.Translator.open", open_translator)
    monkeypatch.setattr("bothways.tuning.tune", lambda *_, **__: SimpleNamespace(chosen=chosen))
    prepared = SimpleNamespace(valid={"valid": text}, test={"t": text})
    monkeypatch.setattr("bothways.data.corpus.Prepared.open", lambda _: prepared)
    monkeypatch.setattr(table, "bothways", lambda *words: " ".join(words))
    monkeypatch.setattr(table, "checkpoints_of", lambda *_: ["best", "average"])
    entry = table.Entry("one", Path("one.yaml"), [], None, list(table.VARIANTS), None)
    job = table.Job(Path("t.yaml"), [], "valid", ["t"], [], {"one": entry}, tmp_path, 5, [])
    rows = table.measure(job, "one", 1)
    settings = [(row["system"], row["length_penalty"], row["rerank_weight"]) for row in rows]
    both = table.SELF + table.TUNED
    assert settings == [
        ("one", 0.6, None),
        ("one+self-rerank", 0.6, 0.5),
        ("one+tuned", 1.3, None),
        (f"one{both}", 1.3, 0.2),
    ]
    assert [row["valid_bleu"] for row in rows] == [100.0, 100.0, 50.0, 50.0]
    decoded_with = [(options["rerank"], options["length_penalty"]) for options in opened]
    # For each way to decode both checkpoints once, then the tests of every row.
    assert decoded_with == [
        *[("none", 0.6)] * 3,
        *[("self", 0.6)] * 3,
        ("none", 1.3),
        ("self", 1.3),
    ]
