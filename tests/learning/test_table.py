"""A table of systems: what is made from what, what stands in a row, and that nothing is trained twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corpus import ROOT, environment, pairs, tiny, write_config, write_pairs

SYSTEMS = ["transformer-l2r", "no-interaction", "no-interaction+self-rerank", "bift", "bift+self-rerank", "reranked"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, recipes and a table of them that trains in seconds."""
    folder = tmp_path_factory.mktemp("table")
    rows = pairs(60)
    for name, some in {"train": rows[12:], "dev": rows[:6], "news": rows[6:12]}.items():
        write_pairs(folder, name, some)
    fast = {"updates": 6, "save_every": 2}
    for name, system in (("one", "transformer-l2r"), ("two", "no-interaction"), ("three", "bift"), ("four", "rerank")):
        config = tiny(folder / "unused", system, train=fast, search={"beam": 4, "max_length": 6})
        if system == "bift":
            config["strategy"] = {"name": "fine-tuning", "share": 1.0, "updates": 4}
        write_config(folder / f"{name}.yaml", config)
    write_config(
        folder / "table.yaml",
        {
            "prepare": "--source train.src --target train.tgt --valid dev dev.src dev.tgt "
            "--test news news.src news.tgt --vocab 50 --kind words",
            "valid": "dev",
            "tests": ["news"],
            "base": ["transformer-l2r"],
            "systems": {
                "transformer-l2r": {"recipe": "one.yaml"},
                "no-interaction": {"recipe": "two.yaml", "self_rerank": True},
                "bift": {
                    "recipe": "three.yaml",
                    "options": ["--strategy.first={no-interaction}"],
                    "self_rerank": True,
                    "base": "no-interaction",
                },
                "reranked": {"recipe": "four.yaml", "options": ["--runs=[{transformer-l2r}, {no-interaction}]"]},
            },
        },
    )
    return folder / "table.yaml"


def call(table: Path, *options: str) -> str:
    """The program, run to its end."""
    words = [sys.executable, str(ROOT / "tools" / "table.py"), str(table), "--raw", str(table.parent), "--average", "2"]
    words += ["--work", str(table.parent / "runs"), "--rows", str(table.parent / "rows.json"), *options]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


def rows_of(table: Path) -> list[dict[str, Any]]:
    """What was written."""
    found: list[dict[str, Any]] = json.loads((table.parent / "rows.json").read_text(encoding="utf-8"))
    return found


def test_rows_of_a_table(table: Path) -> None:
    call(table, "--systems", "bift")
    before = rows_of(table)
    assert [row["system"] for row in before] == SYSTEMS[1:5]  # what it is made from was trained first
    weights = {path: path.read_bytes() for path in (table.parent / "runs").rglob("model.safetensors")}
    said = call(table, "--jobs", "2")
    rows = rows_of(table)
    assert [row["system"] for row in rows] == SYSTEMS and len(said.splitlines()) == 4 + 2 + len(SYSTEMS)
    assert all(path.read_bytes() == content for path, content in weights.items())  # nothing was trained again
    by_name = {row["system"]: row for row in rows}
    assert [by_name[name]["updates"] for name in SYSTEMS] == [6, 6, 6, 4, 4, 0]
    assert [by_name[name]["updates_total"] for name in SYSTEMS] == [6, 6, 6, 10, 10, 12]
    assert by_name["reranked"]["parameters"] == 2 * by_name["transformer-l2r"]["parameters"]
    l2r, apart = SYSTEMS[:2]
    assert [by_name[name].get("base") for name in SYSTEMS] == [None, l2r, l2r, apart, apart, l2r]
    assert all(0 < row["p_bootstrap"] <= 1 for row in rows if "base" in row)
    expected = {"seed", "test", "bleu", "length_ratio", "loss_tokens", "valid_bleu", "checkpoint", "command"}
    assert all(expected <= row.keys() and row["test"] == "news" and row["seed"] == 1 for row in rows)
    assert all(row["checkpoint"] in ("best", "average") for row in rows)
    outputs = (table.parent / "runs/outputs/bift+self-rerank.1.news.txt").read_text(encoding="utf-8")
    assert outputs.count("\n") == 6
    options = json.loads((table.parent / "three.yaml").read_text(encoding="utf-8"))
    write_config(table.parent / "three.yaml", {**options, "train": {**options["train"], "metric": "beauty"}})
    words = [sys.executable, str(ROOT / "tools" / "table.py"), str(table), "--rows", str(table.parent / "rows.json")]
    words += ["--work", str(table.parent / "runs"), "--systems", "bift", "--seeds", "2"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=280, check=False)
    assert done.returncode == 1 and "failed, with the reason at the end of: " in done.stderr
    assert "beauty" in (table.parent / "runs/rows/bift.2.log").read_text(encoding="utf-8").splitlines()[-1]
    assert call(table, "--show").splitlines()[2].startswith("| transformer-l2r | 1 | 6 | 6 |")
