"""Learning by heart, through the Python interface: if this fails, something between text and text is broken."""

from pathlib import Path

import pytest
from corpus import tiny, write_pairs

from bothways import load, train
from bothways.data.prepare import prepare

PAIRS = [
    ("the cat sleeps", "die Katze schläft"),
    ("the dog sleeps", "der Hund schläft"),
    ("the cat sees the dog", "die Katze sieht den Hund"),
    ("the dog sees the cat", "der Hund sieht die Katze"),
    ("a child reads a book", "ein Kind liest ein Buch"),
    ("the child reads", "das Kind liest"),
    ("no one sleeps", "niemand schläft"),
    ("yes", "ja"),
]
SOURCES, TARGETS = [source for source, _ in PAIRS], [target for _, target in PAIRS]
MODEL = {"encoder_layers": 1, "decoder_layers": 1, "width": 32, "dropout": 0.0}
BOTH, TWO_PASSES = ("bift", "bi-rnmt"), ("abd-transformer", "abd-rnmt")


@pytest.mark.parametrize("kind", ["words", "bpe"])
@pytest.mark.parametrize(
    "system",
    ["transformer-l2r", "transformer-r2l", "bift", "abd-transformer", "rnmt-l2r", "rnmt-r2l", "bi-rnmt", "abd-rnmt"],
)
def test_learns_eight_sentences_by_heart(tmp_path: Path, system: str, kind: str) -> None:
    files = write_pairs(tmp_path, "train", PAIRS)
    data = prepare(*files, (), (), tmp_path / "data", vocab=300, kind=kind)  # type: ignore[arg-type]
    updates = {"updates": 60, "batch_tokens": 2000, "learning_rate": 2e-2, "warmup": 20, "log_every": 20}
    model = MODEL if "rnmt" in system else {**MODEL, "feed_forward": 64}
    config = tiny(data.folder, system, model=model, train=updates, search={"beam": 4})
    if system in BOTH:
        config["strategy"] = {"name": "fine-tuning", "share": 1.0, "updates": 30, "warmup": 10, "learning_rate": 1e-2}
    if system in TWO_PASSES:
        config["strategy"] = {"name": "asynchronous", "learning_rate": 1e-2}
    run = train(config, output=tmp_path / "run", device="cpu", quiet=True)
    assert run.folder == tmp_path / "run"
    translator = load(str(tmp_path / "run"), device="cpu")
    found = translator.translate(SOURCES)
    assert [one.text for one in found] == TARGETS
    two = system in (*BOTH, *TWO_PASSES)  # directions, or passes
    directions = ["l2r", "r2l"] if two else [system.split("-")[-1]]
    for one, target in zip(found, TARGETS, strict=True):
        assert {name: best.text for name, best in one.best.items()} == dict.fromkeys(directions, target)
        assert not one.hypotheses[0].cut_off and one.score > -1
