"""`bothways score` prints what the command line of sacreBLEU prints, to the last digit and with its signature."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bothways import cli

WORDS = 'The Minister said, that (in 1,234.5 cases) half-hearted laws don\'t hold: Straße 7, €5.50 & "No!" she asked .'
CHARACTERS = "他们明天去北京我有本书不是的人这中国大学生上下来说"
NAMES = {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER"}


def english(lines: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS.split(), k=draw.randint(1, 30))) for _ in range(lines)]


def chinese(lines: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    between = ["", "", "", ",", " ", " GPU ", "3", "2.5"]
    return [
        "".join(draw.choice(CHARACTERS) + draw.choice(between) for _ in range(draw.randint(1, 30))) + "。"
        for _ in range(lines)
    ]


def corrupted(lines: list[str], seed: int, share: float = 0.15, unit: str = " ") -> list[str]:
    """Words dropped, swapped with their neighbour, repeated, or with the case of their letters swapped."""
    draw = random.Random(seed)
    changed = []
    for line in lines:
        words: list[str] = []
        for word in line.split(unit) if unit else line:
            kind = draw.choice(["drop", "swap", "repeat", "case"]) if draw.random() < share else "keep"
            if kind == "swap" and words:
                words.insert(-1, word)
            elif kind != "drop":
                words += {"repeat": [word, word], "case": [word.swapcase()]}.get(kind, [word])
        changed.append(unit.join(words))
    return changed


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def sacrebleu(hypotheses: str, references: list[str], metrics: list[str], options: list[str], width: int) -> list[str]:
    """What sacreBLEU prints: a line `BLEU|signature = score ...` for each metric, BLEU's details left out."""
    command = [sys.executable, "-m", "sacrebleu", *references, "-i", hypotheses, "-m", *metrics, *options]
    command += ["--format", "text", "--width", str(width)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    return sorted(" ".join(line.split()[:3]) for line in done.stdout.splitlines())


def ours(
    arguments: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The same lines, from what `bothways score --json` prints."""
    monkeypatch.setattr(sys, "argv", ["bothways", "score", *arguments, "--json"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    return sorted(f"{NAMES[m['name']]}|{m['signature']} = {m['score']:.{width}f}" for m in metrics)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("tokenize", ["13a", "none"])
def test_command_lines_agree(
    tokenize: str,
    lowercase: bool,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = english(50, seed=1)
    hypotheses = write(tmp_path / "hypotheses", ["", *corrupted(lines, seed=2)[1:]])
    references = [write(tmp_path / "a", lines), write(tmp_path / "b", corrupted(lines, seed=3, share=0.4))][:count]
    # TER of sacreBLEU's command line ignores case unless told not to; ours follows --lowercase, like the others.
    case = ["--lowercase", "--chrf-lowercase"] if lowercase else ["--ter-case-sensitive"]
    expected = sacrebleu(hypotheses, references, list(NAMES), ["--tokenize", tokenize, "--force", *case], width=6)
    assert len(expected) == 3
    arguments = [hypotheses, "--tokenize", tokenize, *(["--lowercase"] if lowercase else [])]
    arguments += [word for path in references for word in ("--reference", path)]
    arguments += [word for name in NAMES for word in ("--metric", name)]
    assert ours(arguments, 6, monkeypatch, capsys) == expected


def test_command_lines_agree_on_chinese(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = chinese(50, seed=4)
    hypotheses = write(tmp_path / "hypotheses", corrupted(lines, seed=5, unit=""))
    reference = write(tmp_path / "reference", lines)
    expected = sacrebleu(hypotheses, [reference], ["bleu", "chrf"], ["--tokenize", "zh"], width=6)
    arguments = [hypotheses, "--reference", reference, "--metric", "bleu", "--metric", "chrf", "--tokenize", "zh"]
    assert ours(arguments, 6, monkeypatch, capsys) == expected
