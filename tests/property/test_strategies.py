"""What strategies really train on: futures are made from the sources alone, and no prediction sees its own word."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus import tiny
from toy import FAMILIES, Family, family_of

from bothways.config import Config, changed, parse
from bothways.data.batch import AsynchronousBuilder, Batch, Decoded, TripleBuilder
from bothways.data.corpus import Pair, Prepared, Texts
from bothways.data.sampler import Sampler, folds_of, share_of
from bothways.decoding import decode_split
from bothways.experiment import builder_of, train
from bothways.models.interface import Seq2Seq, TwoPass
from bothways.models.table import build, resolve
from bothways.run import Run, start_from
from bothways.tokens import END, L2R, R2L, Direction
from bothways.train.checkpoint import Checkpoints, Snapshot, weights_of
from bothways.translator import Translator

CLOSE = 1e-6
STRATEGIES: dict[str, dict[str, Any]] = {
    "two-pass": {"name": "two-pass"},
    "two-pass with folds": {"name": "two-pass", "folds": 2},
    "fine-tuning": {"name": "fine-tuning", "share": 0.3},
    "fine-tuning with folds": {"name": "fine-tuning", "share": 0.5, "folds": 3},
    "online": {"name": "online", "refresh": 2, "average": 2},
    "asynchronous": {"name": "asynchronous"},
    "asynchronous with folds": {"name": "asynchronous", "folds": 2},
}
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def recipe(prepared: Prepared, name: str, system: str = "bift", **sections: Any) -> dict[str, Any]:
    options = {"updates": 4, "learning_rate": 1e-2, **sections.pop("train", {})}
    strategy = {**STRATEGIES[name], "updates": 5}
    if strategy["name"] == "asynchronous":
        system = family_of(system).asynchronous
    return tiny(prepared.folder, system, train=options, strategy=strategy, **sections)


def with_gold(prepared: Prepared, gold: list[list[int]]) -> Prepared:
    """The same sources with other targets."""
    offsets = np.cumsum([0, *map(len, gold)])
    target = Texts(np.array([i for row in gold for i in row], dtype=np.int64), offsets)
    return replace(prepared, train=Pair(prepared.train.source, target))


def gold_of(prepared: Prepared) -> list[list[int]]:
    return [prepared.train.target[i].tolist() for i in range(len(prepared.train))]


def leaks(model: Seq2Seq, prepared: Prepared, config: Config, rows: np.ndarray) -> set[tuple[int, Direction, int]]:
    """Row, direction and index of every gold word that its own prediction depends on, in batches as they are made."""
    V = prepared.target_vocabulary.size

    def built(some: Prepared) -> Batch:
        return builder_of(config, some).build(rows, 16, len(rows), False)

    def distributions(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return model(batch.source, batch.inputs).exp()

    before, gold, found = distributions(built(prepared)), gold_of(prepared), set()
    for place, row in enumerate(rows.tolist()):
        n = len(gold[row])
        for j in range(n):
            other = [list(text) for text in gold]
            other[row][j] = END + 1 + (other[row][j] - END) % (V - END - 1)
            assert other[row][j] != gold[row][j]
            after = distributions(built(with_gold(prepared, other)))
            for d, i in ((L2R, j), (R2L, n - 1 - j)):
                # the stream of this direction that is gold: of two passes' only row, or of the triple that has it
                at = (place, 2 * int(d)) if before.size(1) == 3 else (2 * place + int(d), int(d))
                a, b = before[at], after[at]
                if not torch.allclose(a[i], b[i], rtol=0, atol=CLOSE):
                    found.add((row, d, i))
                assert not torch.allclose(a[i + 1], b[i + 1], rtol=0, atol=CLOSE), "it is read afterwards"
    return found


def attentive(prepared: Prepared, config: Config) -> Seq2Seq:
    """A model of the run's shape without dropout, whose futures matter."""
    torch.manual_seed(3)
    stronger = {"future_weight": 1.0} if "future_weight" in family_of(config.system).shape else {}
    config = changed(config, model={**stronger, "dropout": 0.0})
    return build(config, prepared.source_vocabulary.size, prepared.target_vocabulary.size)


@pytest.mark.parametrize("pseudo_loss", [0.0, 1.0])
@pytest.mark.parametrize("name", STRATEGIES)
@families
def test_no_strategy_leaks(prepared: Prepared, tmp_path: Path, family: Family, name: str, pseudo_loss: float) -> None:
    config = recipe(prepared, name, family.both, train={"pseudo_loss": pseudo_loss})
    run = train(config, tmp_path / "run", device="cpu", quiet=True)
    assert run.config.decoded is not None
    rows = Decoded.open(Path(run.config.decoded)).rows[:5]
    assert leaks(attentive(prepared, run.config), prepared, run.config, rows) == set()


@pytest.mark.parametrize(
    "family, meeting", [(family, meeting) for family in FAMILIES.values() for meeting in family.meetings[:2]]
)
def test_gold_as_the_future_fails_the_same_test(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, meeting: dict[str, Any]
) -> None:
    """The wrong way: both streams of a triple hold gold text. It leaks from the middle of the sentence on."""
    config = recipe(prepared, "fine-tuning", family.both, model=meeting)
    run = train(config, tmp_path / "run", device="cpu", quiet=True)
    rows = Decoded.open(Path(str(run.config.decoded))).rows[:5]

    def gold_instead(self: TripleBuilder, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        everything = np.arange(len(self.pair))
        text, usable = self.pair.target, np.ones(len(self.pair), dtype=bool)
        self.decoded = Decoded(Path(), everything, {L2R: text, R2L: text}, {L2R: usable, R2L: usable})
        return real(self, rows, width, size, fixed)

    real = TripleBuilder.build
    monkeypatch.setattr(TripleBuilder, "build", gold_instead)
    lengths = {row: len(prepared.train.target[row]) for row in rows.tolist()}
    lag = family.lag(meeting)
    expected = {(row, d, i) for row, n in lengths.items() for d in (L2R, R2L) for i in range(n) if 2 * i >= n + lag}
    assert leaks(attentive(prepared, run.config), prepared, run.config, rows) == expected


@families
def test_gold_as_the_first_pass_fails_the_same_test(prepared: Prepared, tmp_path: Path, family: Family) -> None:
    """The wrong way for two passes: every word leaks, from the first on; and r2l, which reads nobody, none."""
    run = train(recipe(prepared, "asynchronous", family.both), tmp_path / "run", device="cpu", quiet=True)
    rows = Decoded.open(Path(str(run.config.decoded))).rows[:5]

    def gold_instead(self: AsynchronousBuilder, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        everything, usable = np.arange(len(self.pair)), np.ones(len(self.pair), dtype=bool)
        self.decoded = Decoded(Path(), everything, {R2L: self.pair.target}, {R2L: usable})
        return real(self, rows, width, size, fixed)

    real = AsynchronousBuilder.build
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AsynchronousBuilder, "build", gold_instead)
        found = leaks(attentive(prepared, run.config), prepared, run.config, rows)
    assert found == {(row, L2R, i) for row in rows.tolist() for i in range(len(prepared.train.target[row]))}


@pytest.mark.parametrize("name", STRATEGIES)
@families
def test_futures_are_made_from_the_source_alone(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, name: str
) -> None:
    """Every stage that decodes gives identical tokens whatever the gold text is, for the same weights."""
    draw, V = np.random.default_rng(0), prepared.target_vocabulary.size
    shuffled = with_gold(prepared, [draw.integers(END + 2, V, len(text)).tolist() for text in gold_of(prepared)])
    import bothways.experiment as experiment

    real, compared = experiment.decode_parts, []

    def twice(job: Any, parts: Any, say: Any) -> None:
        real(job, parts, say)
        other = replace(job, prepared=shuffled, output=tmp_path / "other" / job.output.name)
        real(other, parts, say)
        a, b = (Decoded.open(folder) for folder in (job.output, other.output))
        read = {R2L} if "asynchronous" in name else {L2R, R2L}
        assert a.rows.tolist() == b.rows.tolist() and a.texts.keys() == b.texts.keys() == read
        for d in a.texts:
            assert len(a.texts[d].ids) and a.texts[d].ids.tolist() == b.texts[d].ids.tolist()
            assert a.usable[d].tolist() == b.usable[d].tolist()
        compared.append(job.output.name)

    monkeypatch.setattr(experiment, "decode_parts", twice)
    train(recipe(prepared, name, family.both), tmp_path / "run", device="cpu", quiet=True)
    assert compared == (["decoded-1", "decoded-2", "decoded-3"] if name == "online" else ["decoded"])


# -- who decodes what -------------------------------------------------------------------------------------------------


def stand_in(folder: Path, prepared: Prepared, system: str, seed: int) -> Run:
    """A run with decisive random weights, so that texts differ and some end."""
    run = Run.create(folder, resolve(parse(tiny(prepared.folder, system, train={"seed": seed}))), prepared)
    model = run.fresh_model()
    with torch.no_grad():
        model.output_weight.mul_(3)
    Checkpoints(run.folder).save(Snapshot(weights_of(model), {}, {"update": 1}))
    return run


def test_interaction_begins_where_it_changes_nothing(prepared: Prepared, tmp_path: Path) -> None:
    """BI-RNMT, from a run without interaction: the same predictions, whatever the other direction says."""
    run = stand_in(tmp_path / "first", prepared, "rnmt-no-interaction", 6)
    first, V = run.model(), prepared.target_vocabulary.size
    config = resolve(parse(tiny(prepared.folder, "bi-rnmt")))
    model = build(config, prepared.source_vocabulary.size, V).eval()
    source, inputs = torch.tensor([[5, 6, END]]), torch.tensor([[[1, 5, 6, 7], [2, 7, 8, 9]]])
    with torch.no_grad():
        expected = first(source, inputs)
        assert not torch.allclose(model(source, inputs), expected)
        said: list[str] = []
        start_from(model, run.folder, (prepared.source_vocabulary, prepared.target_vocabulary), said.append)
        torch.testing.assert_close(model(source, inputs), expected)
    assert "new here: future_attention.v" in said[0] and "future_combine.weight" in said[0]


def test_a_split_is_what_the_run_decodes(prepared: Prepared, tmp_path: Path) -> None:
    """In reading order, both directions, usable where complete and not empty; with a prepared set's name as well."""
    run = stand_in(tmp_path / "run", prepared, "no-interaction", 6)
    for split, pair in (("train", prepared.train), ("dev", prepared.valid["dev"].pair)):
        decode_split(run.folder, split, tmp_path / split, device="cpu", greedy=True)
        found = Decoded.open(tmp_path / split)
        assert found.rows.tolist() == list(range(len(pair)))
        translator = Translator.open(run.folder, device="cpu", greedy=True)
        turned = 0  # texts that are another one backwards
        for row in found.rows[:20].tolist():
            (one,) = translator.translate([prepared.source_vocabulary.decode(pair.source[row].tolist())])
            for d in (L2R, R2L):
                text = prepared.target_vocabulary.decode(found.texts[d][row].tolist())
                assert text == one.best[d.label].text
                assert found.usable[d][row] == (bool(text) and not one.best[d.label].cut_off)
                turned += d is R2L and text.split() != text.split()[::-1]
        assert turned > 1


@families
def test_each_direction_is_decoded_by_its_own_model(prepared: Prepared, tmp_path: Path, family: Family) -> None:
    """Two-pass: the l2r text is the l2r model's, the r2l text the other's; runs that are there are taken."""
    given = {d: stand_in(tmp_path / d, prepared, getattr(family, d), s) for s, d in enumerate(("l2r", "r2l"))}
    config = recipe(prepared, "two-pass", family.both)
    config["strategy"] |= {d: str(run.folder) for d, run in given.items()} | {"updates": 1}
    train(config, tmp_path / "run", device="cpu", quiet=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == [
        "checkpoints", "decoded", "tensorboard",
    ]  # fmt: skip
    both = Decoded.open(tmp_path / "run" / "decoded")
    for d, run in given.items():
        decode_split(run.folder, "train", tmp_path / f"{d}-alone", device="cpu", greedy=True)
        alone = Decoded.open(tmp_path / f"{d}-alone")
        assert list(alone.texts) == [Direction[d.upper()]]
        for direction, texts in alone.texts.items():
            assert texts.ids.tolist() == both.texts[direction].ids.tolist()
            assert texts.offsets.tolist() == both.texts[direction].offsets.tolist()


def test_a_fold_is_decoded_by_a_model_that_has_not_seen_it(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bothways.experiment as experiment

    trained: dict[str, np.ndarray] = {}
    decoded: dict[str, np.ndarray] = {}
    real = experiment.decode_parts

    def watched(job: Any, parts: Any, say: Any) -> None:
        for part in parts:
            decoded[part.run.name] = part.rows
            config = Run.open(part.run).config
            builder = builder_of(config, prepared)
            sampler = Sampler(builder.lengths, 500, config.train.max_length, 1, builder.rows)
            trained[part.run.name] = np.unique(np.concatenate([u.rows for u in sampler._epoch(0)]))
        real(job, parts, say)

    monkeypatch.setattr(experiment, "decode_parts", watched)
    train(recipe(prepared, "two-pass with folds"), tmp_path / "run", device="cpu", quiet=True)
    assert list(decoded) == ["l2r-1", "l2r-2", "r2l-1", "r2l-2"]
    everything = set(range(len(prepared.train)))
    for name in decoded:
        assert set(trained[name]) | set(decoded[name]) == everything and len(decoded[name]) == len(everything) // 2
        assert not set(trained[name]) & set(decoded[name])
    assert set(decoded["l2r-1"]) | set(decoded["l2r-2"]) == everything


@families
def test_two_passes_go_on_from_the_r2l_run(prepared: Prepared, tmp_path: Path, family: Family) -> None:
    """Encoder, embeddings and r2l decoder are that run's; from scratch they are not. A run that is there is taken."""
    given = stand_in(tmp_path / "r2l", prepared, family.r2l, 5)
    expected = weights_of(given.model())
    for origin in (None, "scratch"):
        config = recipe(prepared, "asynchronous", family.both, train={"learning_rate": 1e-9})
        config["strategy"] |= {"r2l": str(given.folder), "updates": 1, "from": origin}
        run = train(config, tmp_path / f"from {origin}", device="cpu", quiet=True)
        assert not (run.folder / "r2l").exists()
        model = run.model()
        assert isinstance(model, TwoPass)
        found = weights_of(model.first)
        assert found.keys() == expected.keys()
        close = [torch.allclose(found[name], expected[name], atol=1e-6) for name in expected]
        assert all(close) if origin is None else not all(close)
    decode_split(given.folder, "train", tmp_path / "alone", device="cpu", greedy=True)
    texts = [Decoded.open(folder).texts[R2L].ids.tolist() for folder in (tmp_path / "alone", run.folder / "decoded")]
    assert texts[0] == texts[1]


@families
def test_without_interaction_both_passes_learn_from_gold_text_at_once(
    prepared: Prepared, tmp_path: Path, family: Family
) -> None:
    """No text is decoded, since nobody reads any; a run with interaction can go on from it."""
    off = tiny(prepared.folder, family.asynchronous, model={"interaction": False})
    run = train(off, tmp_path / "off", device="cpu", quiet=True)
    fresh, trained = weights_of(run.fresh_model()), weights_of(run.model())
    moved = {name.split(".")[0] for name in trained if not torch.equal(fresh[name], trained[name])}
    assert moved == {name.split(".")[0] for name in trained}
    config = recipe(prepared, "asynchronous", family.both, train={"learning_rate": 1e-9})
    r2l = train(tiny(prepared.folder, family.r2l), tmp_path / "r2l", device="cpu", quiet=True)
    config["strategy"] |= {"updates": 1, "from": str(run.folder), "r2l": str(r2l.folder)}
    model = train(config, tmp_path / "on", device="cpu", quiet=True).model()
    found = weights_of(model)
    assert all(torch.allclose(found[name], trained[name], atol=1e-6) for name in trained)
    assert found.keys() - trained.keys() == model.interaction_parameters() != set()


@families
def test_a_split_decoded_by_two_passes_holds_what_the_second_says(
    prepared: Prepared, tmp_path: Path, family: Family
) -> None:
    run = stand_in(tmp_path / "run", prepared, family.asynchronous, 6)
    decode_split(run.folder, "dev", tmp_path / "dev", device="cpu", greedy=True)
    found = Decoded.open(tmp_path / "dev")
    assert found.texts.keys() == {L2R}
    translator = Translator.open(run.folder, device="cpu", greedy=True)
    for row, one in enumerate(translator.translate(prepared.valid["dev"].source_lines())):
        assert prepared.target_vocabulary.decode(found.texts[L2R][row].tolist()) == one.text


def test_shares_and_folds_follow_from_the_seed(prepared: Prepared) -> None:
    lengths = (prepared.train.source.lengths, prepared.train.target.lengths)
    config = parse(tiny(prepared.folder)).train
    small, large = (set(share_of(lengths, share, config)) for share in (0.2, 0.6))
    assert small < large and (len(small), len(large)) == (24, 72)
    assert set(share_of(lengths, 0.2, changed(parse(tiny(prepared.folder)), train={"seed": 2}).train)) != small
    folds = folds_of(10, 3, 1)
    assert sorted(np.bincount(folds)[1:]) == [3, 3, 4] and folds.tolist() == folds_of(10, 3, 1).tolist()


def test_online_decodes_what_the_next_updates_read_and_with_an_average(prepared: Prepared, tmp_path: Path) -> None:
    config = recipe(prepared, "online", train={"batch_tokens": 60})
    run = train(config, tmp_path / "run", device="cpu", quiet=True)
    builder = builder_of(run.config, prepared)
    sampler = Sampler(builder.lengths, 60, 256, 1, builder.rows)
    updates = sampler.updates(0)
    for number in (1, 2, 3):
        read = np.unique(np.concatenate([next(updates).rows for _ in range(2)]))
        assert Decoded.open(tmp_path / "run" / f"decoded-{number}").rows.tolist() == read.tolist()
    assert len(read) < len(prepared.train) / 2
    averaged = Checkpoints(run.folder).load("average").progress["averaged"]
    assert averaged == [3, 4]  # the last decoding's: the newest checkpoints of the round before
