"""What goes wrong by a person's hand: one line that says what to do, a status that is not zero, never a traceback."""

import io
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest
from corpus import ROOT, command, start, tiny, write_config, write_lines, write_pairs

from bothways import cli
from bothways.data import corpus as corpus_module
from bothways.data.corpus import Prepared
from bothways.data.prepare import prepare
from bothways.experiment import train

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """The command line in this process: status, stdout, stderr."""

    def run(*arguments: object, stdin: bytes = b"a b\n") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["bothways", *map(str, arguments)])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


def assert_says(found: tuple[int, str, str], message: str, status: int = 2) -> None:
    """Exactly this, in one line; `...` stands for anything."""
    code, out, err = found
    pattern = re.escape(f"bothways: {message}\n").replace(re.escape("..."), "[^\n]*")
    assert re.fullmatch(pattern, err), f"said:\n{err}expected:\nbothways: {message}"
    assert code == status and out == ""


@pytest.fixture(scope="module")
def runs(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four systems, each trained for two updates."""
    folder = tmp_path_factory.mktemp("runs")
    short = {"updates": 2, "save_every": 1}
    strategies = {
        "bift": {"name": "fine-tuning", "share": 0.1, "updates": 2},
        "abd-transformer": {"name": "asynchronous", "r2l": str(folder / "transformer-r2l")},
    }
    for system in ("transformer-l2r", "transformer-r2l", "bift", "abd-transformer"):
        config = tiny(prepared.folder, system, train=short)
        if system in strategies:
            config["strategy"] = strategies[system]
        train(config, folder / system, device="cpu", quiet=True)
        write_config(folder / f"{system}.yaml", config)
    return folder


# -- prepare and check -------------------------------------------------------------------------------------------------


def files(folder: Path, source: bytes = b"a b\nc\n", target: bytes = b"b a\nc\n") -> tuple[Path, Path]:
    (folder / "s").write_bytes(source)
    (folder / "t").write_bytes(target)
    return folder / "s", folder / "t"


@pytest.mark.parametrize(
    "source, target, message",
    [
        (b"a\nb\n", b"a\n", "{s} has 2 lines but {t} has 1; line i of one must translate line i of the other"),
        (b"a\n\n", b"a\nb\n", "{s}, line 2: is empty; both sides of a training pair must have text (`...` lists all)"),
        (b"a\nb\n", b"a\n \n", "{t}, line 2: is empty; both sides of a training pair must have text (`...` lists all)"),
        (b"a\nb\xff\n", b"a\nb\n", "{s}, line 2: byte 0xff at position 2 is not UTF-8; text must be encoded in UTF-8"),
        (b"", b"", "{s}: is empty; it must hold at least one line"),
        (b"a\n", b"", "{t}: is empty; it must hold at least one line"),
    ],
)
def test_prepare_refuses_wrong_text(say: Say, tmp_path: Path, source: bytes, target: bytes, message: str) -> None:
    s, t = files(tmp_path, source, target)
    found = say("prepare", "--source", s, "--target", t, "--output", tmp_path / "data", "--kind", "words")
    assert_says(found, message.format(s=s, t=t))
    assert not (tmp_path / "data").exists()


def test_prepare_refuses_wrong_arguments(say: Say, tmp_path: Path) -> None:
    s, t = files(tmp_path)
    write_lines(tmp_path / "x", ["a file"])
    common = ("prepare", "--source", s, "--target", t, "--output", tmp_path / "data")
    for options, message in (
        (("--kind", "bytes"), "--kind must be bpe or words, got 'bytes'"),
        (("--vocab", 100), "vocab must be at least 261 for subwords (5 special tokens and 256 bytes), got 100"),
        (("--valid", "dev", s), f"--valid must be NAME SRC REF [REF...], got 'dev {s}'"),
        (("--test", "a/b", s, t), "test: a name must be letters, digits and any of . + - _, got 'a/b'"),
        (("--valid", "dev", s, tmp_path / "no"), f"{tmp_path}/no: no such file"),
        (("--source", tmp_path / "no"), f"{tmp_path}/no: no such file"),
        (("--source", tmp_path), f"{tmp_path}: must be a regular file (it is read more than once)"),
        (("--output", tmp_path / "x"), f"{tmp_path}/x: is a file, but the output must be a folder"),
        (("--output", tmp_path), f"{s}: lies in the folder that would be written, {tmp_path}; choose another output"),
    ):
        assert_says(say(*common, *options), message)


def test_a_split_is_decoded_or_refused(say: Say, prepared: Prepared, runs: Path, tmp_path: Path) -> None:
    run, out = runs / "transformer-l2r", tmp_path / "decoded"
    common = ("decode", run, "--device", "cpu", "--split")
    for options, message in (
        (("train",), "--split needs --output FOLDER, which training reads as `decoded:`"),
        (("news", "--output", out), "--split: must be one of train, dev, got 'news'"),
        (
            ("train", "--output", out, "--nbest", "2"),
            "--split decodes prepared sources for training; it takes no option of text in or text out",
        ),
        (
            ("train", "--output", out, "--direction", "r2l"),
            f"search.direction: {run} is a transformer-l2r run and decodes l2r only, got 'r2l'",
        ),
        (("train", "--output", out, "--data", tmp_path), f"{tmp_path}: is not a prepared folder (no meta.json); ..."),
    ):
        assert_says(say(*common, *options), message)
    assert say(*common, "dev", "--output", out, "--quiet") == (0, "", "")
    config = write_config(tmp_path / "c.yaml", tiny(prepared.folder, train={"pseudo_loss": 1.0}, decoded=str(out)))
    found = say("train", config, "--output", tmp_path / "run", "--device", "cpu")
    assert_says(found, f"{out}: holds decoded text of dev, not of the training sources")
    assert say(*common, "train", "--output", out, "--quiet") == (0, "", "")
    config = write_config(tmp_path / "c.yaml", tiny(prepared.folder, "bift", decoded=str(out)))
    found = say("train", config, "--output", tmp_path / "other", "--device", "cpu")
    assert_says(found, f"{out}: holds no r2l text, only l2r")


def test_check_names_a_missing_file(say: Say, tmp_path: Path) -> None:
    s, _ = files(tmp_path)
    code, out, err = say("check", "--source", s, "--target", tmp_path / "no")
    assert code == 2 and f"{tmp_path}/no: no such file" in out + err and (out + err).count("\n") <= 6


def test_prepare_on_a_full_disk(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s, t = files(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_module.os, "fsync", full)
    found = say("prepare", "--source", s, "--target", t, "--output", tmp_path / "data", "--kind", "words")
    assert_says(found, f"{tmp_path}/data...: cannot be written: no space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "t"]


# -- train -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (["--train.updats=3"], "{config}: train.updats: unknown key; accepted here: updates, batch_tokens, ..."),
        (["--trian.updates=3"], "{config}: trian: unknown key; accepted here: system, data, ..."),
        (["--train.updates=many"], "{config}: train.updates: must be a valid integer, got 'many'"),
        (["--train.updates=0"], "{config}: train.updates: must be greater than or equal to 1, got 0"),
        (["--train.updates=2.5"], "{config}: train.updates: must be a valid integer, got 2.5"),
        (["--model.dropout=1"], "{config}: model.dropout: must be less than 1, got 1"),
        (["--model.dropout=.nan"], "{config}: model.dropout: must be a finite number, got nan"),
        (["--model.fusion=sum"], "{config}: model.fusion: must be 'tanh', 'linear' or 'gate', got 'sum'"),
        (["--model.heads=3"], "{config}: model.width: must be a multiple of heads (3), got 16"),
        (["--model=3"], "{config}: model: must be a valid dictionary or instance of ModelConfig, got 3"),
        (["--search.nbest=5"], "{config}: search.nbest: must be at most beam (2), got 5"),
        (["--train.adam_betas=[0.9,1.5]"], "{config}: train.adam_betas.1: must be less than 1, got 1.5"),
        (["--system=bft"], "system: must be one of transformer-l2r, transformer-r2l, ..., got 'bft'"),
        (["--train.metric=blue"], "train.metric: must be one of loss, ..., got 'blue'"),
        (["--model.direction=r2l"], "model.direction: system transformer-l2r is l2r, got 'r2l'"),
        (["--model.interaction=true"], "model.interaction: system transformer-l2r has none, got on; `bift` has"),
        (["--search.direction=r2l"], "search.direction: system transformer-l2r decodes l2r only, got 'r2l'"),
        (
            ["--system=bift", "--search.beam=3"],
            "...search.beam: must be even when both directions decode (each takes half), got 3",
        ),
        (["--system=bift"], "decoded: is required to train with interaction, since gold text as the future would ..."),
        (["--system=abd-transformer"], "decoded: is required...; set `strategy: {{name: asynchronous}}`, which ..."),
        (
            ["--strategy.name=fine-tuning"],
            "strategy: is for systems with interaction (bift, abd-transformer, bi-rnmt, abd-rnmt), but system is ...",
        ),
        (["--model.future_span=current"], "{config}: model.future_span: does not belong to transformer-l2r, got ..."),
        (["--system=rnmt-l2r"], "{config}: model.heads: does not belong to rnmt-l2r, got 2"),
        (["--model.preset=paper"], "{config}: model.preset: must be one of tiny, ..., big for transformer-l2r, ..."),
        (
            ["--strategy.name=two"],
            "{config}: strategy.name: must be 'two-pass', 'fine-tuning', 'online' or 'asynchronous', got 'two'",
        ),
        (
            ["--system=bift", "--strategy.name=asynchronous"],
            "strategy.name: must be two-pass or fine-tuning or online for system bift, got 'asynchronous'",
        ),
        (
            ["--system=abd-transformer", "--strategy.name=two-pass"],
            "strategy.name: must be asynchronous for system abd-transformer, got 'two-pass'",
        ),
        (
            ["--system=abd-transformer", "--search.direction=both"],
            "search.direction: system abd-transformer decodes l2r only, got 'both'",
        ),
        (
            ["--strategy.name=asynchronous", "--strategy.l2r=run/"],
            "{config}: strategy.l2r: does not belong to asynchronous, got 'run/'",
        ),
        (
            ["--strategy.name=online", "--strategy.folds=2"],
            "{config}: strategy.folds: does not belong to online, got 2",
        ),
        (
            ["--strategy.name=fine-tuning", "--strategy.l2r=run/"],
            "{config}: strategy.l2r: does not belong to fine-tuning, got 'run/'",
        ),
        (
            ["--strategy.name=two-pass", "--strategy.l2r=run/", "--strategy.folds=2"],
            "{config}: strategy.folds: takes models that it trains itself, not l2r or r2l, got 2",
        ),
        (
            ["--strategy.name=online", "--strategy.refresh=3"],
            "{config}: strategy.average: must be at most refresh (3), got 5",
        ),
        (["--strategy.name=online", "--strategy.form=x"], "{config}: strategy.form: unknown key; accepted...from, ..."),
        (["--train.without_fold=2"], "{config}: train.without_fold: must be one of 2 or more folds (1), got 2"),
        (
            ["--system=bift", "--decoded=none"],
            "none: holds no decoded text; a strategy writes it, or `bothways decode RUN --split train`",
        ),
        (
            ["--decoded=none"],
            "decoded: system transformer-l2r reads no future; set train.pseudo_loss above 0 to train on ...",
        ),
        (["--data", "nowhere/else"], "nowhere/else: no such folder; `bothways prepare` makes it"),
        (["--data=nowhere"], "nowhere: no such folder; `bothways prepare` makes it"),
        (["--train.start_from=nowhere"], "nowhere: is not a run (it has no config.yaml); `bothways train` makes one"),
        (["--train.max_length=2"], "train.max_length: all 120 training pairs are longer than 2 tokens"),
        (["--device", "gpu"], "--device: must be one of cpu... on this machine..., got 'gpu'"),
        (["updates=3"], "unknown argument 'updates=3'; an override has the form --section.option=value"),
        (["--train.updates", "3"], "unknown argument '--train.updates'; an override has the form --section..."),
        (["--train.updates=[1"], "the value of override '--train.updates=[1' is not valid YAML; put it in quotes"),
        (["--system.a=3"], "override '--system.a=3': system is not a section"),
    ],
)  # fmt: skip
def test_train_refuses_what_it_cannot_do(
    say: Say, prepared: Prepared, tmp_path: Path, options: list[str], message: str
) -> None:
    settings = tiny(prepared.folder)
    if "max_length" in options[0]:  # a corpus with longer lines only
        folder = tmp_path / "long"
        pair = write_pairs(folder, "train", [(f"a b c {'d ' * (i % 5)}", "a b c") for i in range(120)])
        settings["data"] = str(prepare(*pair, (), (), folder / "data", vocab=50, kind="words").folder)
    config = write_config(tmp_path / "config.yaml", settings)
    found = say("train", config, "--output", tmp_path / "run", *options)
    assert_says(found, message.format(config=config))


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1, 2]", "{config}: must hold keys such as `system:` and `data:`, but holds list"),
        ("system: [", "{config}: cannot be read as YAML: ..."),
        ("", "{config}: system: is required; data: is required"),
        ("system: bift\ndata: 3\n", "{config}: data: must be a valid string, got 3"),
    ],
)
def test_train_refuses_a_wrong_file(say: Say, tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "config.yaml"
    assert_says(say("train", config, "--output", tmp_path / "run"), f"{config}: no such configuration file")
    config.write_text(text, encoding="utf-8")
    assert_says(say("train", config, "--output", tmp_path / "run"), message.format(config=config))


def test_train_refuses_to_mix_experiments(say: Say, runs: Path, tmp_path: Path) -> None:
    config, run = runs / "transformer-l2r.yaml", runs / "transformer-l2r"
    assert_says(
        say("train", config, "--output", run, "--model.dropout=0.3", "--train.seed=5"),
        f"{run}: was started with model.dropout = 0.1, but is now asked for 0.3 (and 1 more options differ); "
        "give another --output, or the old value to resume",
    )
    assert_says(
        say("train", runs / "bift.yaml", "--output", runs / "bift", "--model.future_weight=0.5"),
        f"{runs / 'bift'}: was started with model.future_weight = 0.1, but is now asked for 0.5; "
        "give another --output, or the old value to resume",
    )
    assert_says(
        say("train", runs / "bift.yaml", "--output", run),
        f"{run}: holds a run that was trained without a strategy; give another --output",
    )
    assert_says(say("train", config, "--output", config), f"{config}: is a file; --output must be a folder")


def test_train_does_not_write_into_a_prepared_folder(say: Say, runs: Path, tmp_path: Path) -> None:
    """`--output data/` by mistake: nothing is written, nor trained for hours before it is noticed."""
    pair = write_pairs(tmp_path, "some", [("a b x", "x y"), ("b", "z")])
    data = prepare(*pair, (), (), tmp_path / "data", vocab=50, kind="words").folder
    before = sorted(data.rglob("*"))
    for system in ("transformer-l2r", "bift"):
        found = say("train", runs / f"{system}.yaml", "--data", data, "--output", data)
        assert_says(found, f"{data}: holds data, not a run; give another --output")
    assert sorted(data.rglob("*")) == before


def test_early_stopping_needs_a_validation_set(say: Say, runs: Path, tmp_path: Path) -> None:
    pair = write_pairs(tmp_path, "some", [("a b x", "x y"), ("b", "z")])
    data = prepare(*pair, (), (), tmp_path / "data", vocab=50, kind="words").folder
    common = ("train", runs / "transformer-l2r.yaml", "--data", data, "--output", tmp_path / "run")
    for option, value in (("patience", 3), ("metric", "bleu")):
        assert_says(
            say(*common, f"--train.{option}={value}"),
            f"train.{option}: needs a validation set, but {data} has none; prepare it with --valid, "
            f"or leave train.{option} out",
        )


def test_train_refuses_other_data(say: Say, runs: Path, tmp_path: Path) -> None:
    pair = write_pairs(tmp_path, "other", [("a b x", "x y"), ("b", "z")])
    other = prepare(*pair, (), (), tmp_path / "data", vocab=50, kind="words")
    config, run = runs / "transformer-l2r.yaml", runs / "transformer-l2r"
    assert_says(
        say("train", config, "--output", run, f"--data={other.folder}"),
        f"{run}: was started with other prepared data (fingerprint ...) than {other.folder} (...); "
        "give another --output",
    )
    assert_says(
        say("train", config, "--output", tmp_path / "new", "--quiet", f"--data={other.folder}",
            f"--train.start_from={run}"),
        f"{run}: has another vocabulary than this run's data; prepare both with the same one",
    )  # fmt: skip
    assert_says(  # also where all stages are done
        say("train", runs / "bift.yaml", "--output", runs / "bift", "--data", other.folder),
        f"{runs / 'bift'}: stage first was done with other prepared data (fingerprint ...) than {other.folder} (...); "
        "give another --output",
    )
    settings = json.loads((runs / "bift.yaml").read_text(encoding="utf-8")) | {"strategy": None}
    settings |= {"decoded": str(runs / "bift" / "decoded"), "data": str(other.folder)}
    assert_says(
        say("train", write_config(tmp_path / "config.yaml", settings), "--output", tmp_path / "third"),
        f"{runs / 'bift' / 'decoded'}: was decoded from other prepared data (fingerprint ...) than this run's (...); "
        "decode again",
    )


def test_starting_from_a_run_of_another_shape_lists_the_names(say: Say, runs: Path, tmp_path: Path) -> None:
    config = runs / "transformer-l2r.yaml"
    run = runs / "transformer-l2r"
    assert_says(
        say("train", config, "--output", tmp_path / "run", "--model.feed_forward=8", f"--train.start_from={run}"),
        f"{run}: its weights do not fit this model's shape or vocabulary: encoder.0.feed_forward.inner.weight, "
        "... and 4 more",
    )


def test_train_leaves_out_a_long_line_and_says_so(say: Say, tmp_path: Path) -> None:
    rows = [("a b", "b a"), ("a " * 5_000, "a"), ("b", "b")]
    data = prepare(*write_pairs(tmp_path, "train", rows), (), (), tmp_path / "data", vocab=50, kind="words")
    config = write_config(tmp_path / "config.yaml", tiny(data.folder, train={"updates": 1}))
    monkeyed = command("train", config, "--output", tmp_path / "run", "--device", "cpu")
    assert monkeyed.returncode == 0
    assert monkeyed.stderr.splitlines()[0] == (
        "1 training pairs of more than 256 tokens are left out (train.max_length)"
    )


def test_a_data_folder_that_is_damaged(say: Say, prepared: Prepared, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(prepared.folder, folder)
    config = write_config(tmp_path / "config.yaml", tiny(folder))
    path = folder / "train" / "source.ids"
    path.write_bytes(path.read_bytes()[:-2])
    assert_says(say("train", config, "--output", tmp_path / "run"), f"{path}: is damaged: ...")
    (folder / "meta.json").write_text("{", encoding="utf-8")
    assert_says(say("train", config, "--output", tmp_path / "run"), f"{folder}/meta.json: is damaged: not JSON: ...")
    (folder / "meta.json").unlink()
    assert_says(
        say("train", config, "--output", tmp_path / "run"),
        f"{folder}: is not a prepared folder (no meta.json); `bothways prepare` makes one",
    )


ONLY_L2R = "search.direction: {run} is a transformer-l2r run and decodes l2r only, got "
NO_FUTURE = "--future: {run} is a transformer-l2r run, which reads no future; accepted: none"

# -- decode ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, stdin, message",
    [
        ([], b"", "the input is empty; it must have at least one line"),
        (["--prefix", "{one}"], b"", "the input is empty; it must have at least one line"),
        (["--score", "{one}"], b"", "the input is empty; it must have at least one line"),
        ([], b"a\n\nb\n", "line 2 is empty; remove it, or give --allow-empty to get an empty line back"),
        (["--prefix", "{one}"], b"\n", "line 1 is empty; remove it, or give --allow-empty to get an empty line back"),
        ([], b"a \xff\n", "stdin, line 1: byte 0xff at position 3 is not UTF-8; text must be encoded in UTF-8"),
        ([], b"a " * 5_000, "line 1 has 5000 tokens, more than the 1024 that a source may have; split it ..."),
        (["--input", "nowhere"], b"", "nowhere: no such file"),
        (["--input", "{folder}"], b"", "{folder}: is a folder, but must be a file"),
        (["--prefix", "nowhere"], b"", "nowhere: no such file"),
        (["--score", "nowhere"], b"", "nowhere: no such file"),
        (["--score", "{one}", "--future", "nowhere"], b"", "nowhere: no such file"),
        (["--beam", "0"], b"a\n", "...search.beam: must be greater than or equal to 1, got 0"),
        (["--nbest", "3"], b"a\n", "...search.nbest: must be at most beam (2), got 3"),
        (["--batch", "0"], b"a\n", "...search.batch_sentences: must be greater than or equal to 1, got 0"),
        (["--length-penalty", "-1"], b"a\n", "...search.length_penalty: must be greater than or equal to 0, got -1.0"),
        (["--direction", "up"], b"a\n", "...search.direction: must be 'l2r', 'r2l' or 'both', got 'up'"),
        (["--direction", "r2l"], b"a\n", ONLY_L2R + "'r2l'"),
        (["--direction", "both"], b"a\n", ONLY_L2R + "'both'"),
        (["--suffix", "{one}"], b"a\n", "a suffix needs r2l decoding, but search.direction is l2r"),
        (["--prefix", "{one}"], b"a\nb\n", "there are 2 sources but 1 lines of prefix; line i of one belongs ..."),
        (["--score", "{one}"], b"a\nb\n", "there are 2 sources but {one} has 1 lines; line i belongs to line i"),
        (["--score", "{one}", "--future", "decoded"], b"a\n", NO_FUTURE),
        (["--score", "{one}", "--future", "{one}"], b"a\n", NO_FUTURE),
        (["--future", "decoded"], b"a\n", "--future belongs to --score FILE, --rerank self or --candidates, got ..."),
        (["--candidates", "{one}", "--future", "decoded"], b"a\n", "{one}, line 1: must be `i ||| text ||| ..."),
        (["--candidates", "{one}", "--trace"], b"a\n", "--candidates takes no --score, --prefix, --suffix or ..."),
        (["--candidates", "{one}", "nowhere"], b"a\n", "nowhere: no such file"),
        (["--candidates", "{nbest}"], b"a\n", "{nbest}, line 2: belongs to source 1, but there are 1, counted from 0"),
        (["--candidates", "{nbest}"], b"a\na\na\n", "{nbest}: holds no candidate of source 2, counted from 0"),
        (["--candidates", "{nbest}", "--future", "decoded"], b"a\na\n", NO_FUTURE),
        (["--future", "{one}"], b"a\n", "--future must be none or decoded without --score FILE, got '{one}'"),
        (["--rerank", "both"], b"a\n", "--rerank must be none or self, got 'both'"),
        (["--rerank", "self"], b"a\n", "...search.rerank: `self` needs both directions to decode, got direction l2r"),
        (["--search.rerank_weight=2"], b"a\n", "...search.rerank_weight: must be less than or equal to 1, got 2"),
        (["--score", "{one}", "--prefix", "{one}"], b"a\n", "--score takes no --prefix and no --suffix: ..."),
        (["--format", "xml"], b"a\n", "--format must be text or jsonl, got 'xml'"),
        (["--precision", "int4"], b"a\n", "--precision must be float32 or bfloat16 or int8, got 'int4'"),
        (["--device", "gpu"], b"a\n", "--device: must be one of cpu... on this machine..., got 'gpu'"),
        (["--checkpoint", "9"], b"a\n", "{run}/checkpoints/000009: no such checkpoint; there are: 000001, 000002"),
        (["--checkpoint", "average"], b"a\n", "{run}/checkpoints/average: no such checkpoint; there are: 000001, ..."),
        (["--train.updates=3"], b"a\n", "--train.updates=3: decoding takes --search.option=value only; ..."),
        (["--search.baem=3"], b"a\n", "...search.baem: unknown key; accepted here: direction, beam, ..."),
        (["--output", "{folder}/no/out"], b"a\n", "{folder}/no/out: cannot be written: No such file or directory"),
        (["--output", "/dev/full"], b"a\n", "/dev/full: cannot be written: no space left on device"),
        (["--input", "{one}", "--output", "{one}"], b"", "--output: {one} is the input, which would be ..."),
    ],
)  # fmt: skip
def test_decode_refuses_what_it_cannot_do(
    say: Say, runs: Path, tmp_path: Path, options: list[str], stdin: bytes, message: str
) -> None:
    run, one = runs / "transformer-l2r", write_lines(tmp_path / "one", ["a"])
    nbest = write_lines(tmp_path / "nbest", ["0 ||| a ||| -1", "1 ||| b ||| -1"])
    places = {"run": run, "one": one, "nbest": nbest, "folder": tmp_path}
    found = say("decode", run, "--quiet", *(option.format(**places) for option in options), stdin=stdin)
    assert_says(found, message.format(**places))
    assert one.read_text(encoding="utf-8") == "a\n"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--on", "train"], "--on: must be one of dev, got 'train'"),
        (["--metric", "loss"], "unknown metric 'loss'; accepted: bleu, chrf, ..."),
        (["--rerank", "self"], "...search.rerank: `self` needs both directions to decode, got direction l2r"),
        (["--rerank", "both"], "--rerank must be none or self, got 'both'"),
        (["--future", "gold"], "--future must be none or decoded, got 'gold'"),
        (["--future", "decoded"], "--future belongs to --rerank self, got 'decoded' without it"),
        (["--data", "nowhere"], "nowhere: no such folder; `bothways prepare` makes it"),
        (["--train.updates=3"], "--train.updates=3: decoding takes --search.option=value only; ..."),
    ],
)
def test_tune_refuses_what_it_cannot_do(say: Say, runs: Path, options: list[str], message: str) -> None:
    run = runs / "transformer-l2r"
    before = (run / "config.yaml").read_bytes()
    assert_says(say("tune", run, "--device", "cpu", "--quiet", *options), message)
    assert (run / "config.yaml").read_bytes() == before and not (run / "tuned.json").exists()


def test_nothing_is_chosen_on_a_test_set(say: Say, prepared: Prepared, runs: Path, tmp_path: Path) -> None:
    files = write_pairs(tmp_path, "news", [("a b", "b a")])
    train_files = write_pairs(tmp_path, "train", [("a b", "a b"), ("c", "c")])
    valid, test = [("dev", files[0], [files[1]])], [("news", files[0], [files[1]])]
    prepare(*train_files, valid, test, tmp_path / "data", kind="words")
    prepare(*train_files, (), test, tmp_path / "untold", kind="words")
    common = ("tune", runs / "transformer-l2r", "--device", "cpu", "--quiet", "--data")
    message = "--on: must be one of dev, got 'news' (it is a test set, on which nothing is chosen)"
    assert_says(say(*common, tmp_path / "data", "--on", "news"), message)
    message = f"{tmp_path}/untold: has no validation set; give `bothways prepare` one by --valid"
    assert_says(say(*common, tmp_path / "untold"), message)


def test_decode_with_both_directions(say: Say, runs: Path, tmp_path: Path) -> None:
    run, two = runs / "bift", write_lines(tmp_path / "two", ["a", "b"])
    for options, message in (
        (["--beam", 3], "...search.beam: must be even when both directions decode (each takes half), got 3"),
        (["--score", two, "--future", write_lines(tmp_path / "three", "abc")],
         "there are 2 sources but 3 futures; line i of one belongs to line i"),
        (["--score", two, "--future", write_lines(tmp_path / "one", "a")],
         "there are 2 sources but 1 futures; line i of one belongs to line i"),
    ):  # fmt: skip
        assert_says(say("decode", run, "--quiet", *options, stdin=b"a\nb\n"), message)
    assert_says(
        say("decode", runs / "transformer-r2l", "--direction", "l2r"),
        f"search.direction: {runs / 'transformer-r2l'} is a transformer-r2l run and decodes r2l only, got 'l2r'",
    )


def test_two_passes_decode_l2r_and_start_from_r2l(say: Say, prepared: Prepared, runs: Path, tmp_path: Path) -> None:
    run, one = runs / "abd-transformer", write_lines(tmp_path / "one", ["a"])
    for options, message in (
        (["--direction", "both"], f"search.direction: {run} is a abd-transformer run and decodes l2r only, got 'both'"),
        (["--direction", "r2l"], f"search.direction: {run} is a abd-transformer run and decodes l2r only, got 'r2l'"),
        (["--suffix", one], "a suffix needs r2l decoding, but search.direction is l2r"),
    ):  # fmt: skip
        assert_says(say("decode", run, "--quiet", *options), message)
    l2r = str(runs / "transformer-l2r")
    strategy = {"name": "asynchronous", "r2l": str(runs / "transformer-r2l"), "from": l2r}
    settings = tiny(prepared.folder, "abd-transformer", train={"updates": 1}, strategy=strategy)
    config = write_config(tmp_path / "config.yaml", settings)
    assert_says(
        say("train", config, "--output", tmp_path / "run", "--device", "cpu", "--quiet"),
        f"train.start_from: must be an r2l run, or one with two passes, for its first pass; {l2r} is a transformer-l2r "
        "run",
    )


def test_two_passes_in_every_form(say: Say, runs: Path, tmp_path: Path) -> None:
    """n-best, forced beginnings, traces and forced scores through the command line."""
    run, one = runs / "abd-transformer", write_lines(tmp_path / "one", ["h"])
    decode = ("decode", run, "--quiet", "--device", "cpu", "--format", "jsonl")
    code, out, err = say(*decode, "--beam", 12, "--nbest", 2, "--trace")
    found = json.loads(out)
    assert (code, err) == (0, "") and len(found["hypotheses"]) == 2
    assert {h["direction"] for h in found["hypotheses"]} == {"l2r"}
    assert all(len(step["tokens"]) == 1 for step in found["trace"]["steps"])  # of the second pass
    (begun,) = json.loads(say(*decode, "--prefix", one)[1])["hypotheses"]
    assert begun["tokens"][0] == "h"
    (scores,) = {say(*decode, "--score", one, *future)[1].partition('"hypotheses"')[2] for future in
                 ((), ("--future", "decoded"))}  # fmt: skip
    other = say(*decode, "--score", one, "--future", write_lines(tmp_path / "other", ["a b c d"]))[1]
    assert scores != other.partition('"hypotheses"')[2]


def test_an_input_that_is_missing_leaves_the_output_alone(say: Say, runs: Path, tmp_path: Path) -> None:
    precious = write_lines(tmp_path / "out", ["precious"])
    found = say("decode", runs / "transformer-l2r", "--input", tmp_path / "no", "--output", precious)
    assert_says(found, f"{tmp_path}/no: no such file")
    assert precious.read_text(encoding="utf-8") == "precious\n"


def test_not_a_run(say: Say, tmp_path: Path, prepared: Prepared) -> None:
    message = "is not a run (it has no config.yaml); `bothways train` makes one"
    for folder in (tmp_path / "nowhere", prepared.folder):
        assert_says(say("decode", folder), f"{folder}: {message}")
        assert_says(say("average", folder), f"{folder}: {message}")


def test_a_run_without_checkpoints(say: Say, runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "transformer-l2r", run)
    shutil.rmtree(run / "checkpoints")
    assert_says(say("decode", run), f"{run}/checkpoints: holds no intact checkpoint; train the run first")
    assert_says(
        say("average", run),
        f"{run}/checkpoints: --last must be from 1 to the number of checkpoints kept (0), got 5",
    )
    (run / "config.yaml").write_text("system: bift\ndata: d\nmodel: {wdth: 3}\n", encoding="utf-8")
    assert_says(say("decode", run), f"{run}/config.yaml: model.wdth: unknown key; accepted here: ...")


def test_corrupt_checkpoints(say: Say, runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "transformer-l2r", run)
    last = run / "checkpoints" / "000002" / "model.safetensors"
    last.write_bytes(last.read_bytes()[:-10])
    code, out, err = say("decode", run, "--checkpoint", "last")
    assert code == 0 and out.count("\n") == 1
    assert err.splitlines()[0] == f"{last}: is damaged (its checksum differs); going back to the checkpoint before it"
    assert_says(say("decode", run, "--checkpoint", 2), f"{last}: is damaged (its checksum differs)")
    assert_says(say("average", run, "--last", 2), f"{last}: is damaged (its checksum differs)")
    first = run / "checkpoints" / "000001" / "model.safetensors"
    first.write_bytes(b"")
    assert_says(
        say("decode", run, "--checkpoint", "last", "--quiet"),
        f"{first}: is damaged (its checksum differs), and no checkpoint before it is intact; "
        f"remove {run}/checkpoints to begin anew",
    )
    assert_says(
        say("train", runs / "transformer-l2r.yaml", "--output", run, "--quiet"),
        f"{first}: is damaged (its checksum differs), and no checkpoint before it is intact; "
        f"remove {run}/checkpoints to begin anew",
    )


# -- score and the rest ------------------------------------------------------------------------------------------------


def test_score_refuses_wrong_input(say: Say, tmp_path: Path) -> None:
    two, three = write_lines(tmp_path / "two", "ab"), write_lines(tmp_path / "three", "abc")
    none, bad = write_lines(tmp_path / "none", ""), tmp_path / "bad"
    bad.write_bytes(b"a\nb\xc3\n")
    for arguments, message in (
        (["--reference", three, two], "...{two}...2...{three}...3..."),
        (["--reference", two, tmp_path / "no"], "{folder}/no: no such file"),
        (["--reference", bad, two], "{bad}, line 2: byte 0xc3 at position 2 is not UTF-8;..."),
        (["--reference", two, "--metric", "blue", two], "...metric... 'blue'..."),
        (["--reference", none, none], "...empty..."),
    ):  # fmt: skip
        code, out, err = say("score", *arguments)
        assert code == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err
        words = [word for word in message.split("...") if word]
        places = {"two": two, "three": three, "folder": tmp_path, "bad": bad}
        # The order of the files is the scorer's to choose.
        assert all(word.format(**places) in err for word in words), err


def test_bench_and_demo_refuse_wrong_options(say: Say, tmp_path: Path) -> None:
    assert_says(say("bench", "--batch", "16,x"), "--batch must be numbers from 1 on, with commas, got '16,x'")
    assert_says(say("bench", "--batch", "0"), "--batch must be numbers from 1 on, with commas, got '0'")
    assert_says(say("bench", "--beam", "3"), "--beam must be 1 or even, because two directions share it, got 3")
    assert_says(say("bench", "--shape", "huge"), "...shape... 'huge'...")
    assert_says(say("demo", "--system", "x", "--output", tmp_path), "--system: must be bift..., got 'x'")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "No such command 'trian'...; `bothways --help` shows what is accepted"),
        (["train"], "Missing argument 'config'; `bothways train --help` shows what is accepted"),
        (["decode"], "Missing argument 'run'; `bothways decode --help` shows what is accepted"),
        (["decode", "run", "--beam", "four"], "Invalid value for '--beam': ...; `bothways decode --help` shows ..."),
        (["decode", "run", "--beam"], "Option '--beam' requires an argument; `bothways COMMAND --help` shows ..."),
        (["average", "run", "--first", "3"], "No such option: --first...; `bothways average --help` shows ..."),
        (["average", "run", "other"], "...unexpected extra argument...other...; `bothways average --help` shows ..."),
        (["prepare", "--source", "a"], "Missing option '--target'; `bothways prepare --help` shows what is accepted"),
        (["score", "a"], "Missing option '--reference'; `bothways score --help` shows what is accepted"),
    ],
)
def test_usage_errors_are_one_line(say: Say, arguments: list[str], message: str) -> None:
    assert_says(say(*arguments), message)


# -- streams and signals, in processes of their own --------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(runs: Path, tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one", ["a b"])
    for arguments in (
        ["decode", runs / "transformer-l2r", "--input", one, "--quiet", "--device", "cpu"],
        ["score", "--reference", one, one],
        ["systems"],
    ):
        with open("/dev/full", "w") as full:
            process = start(*arguments, stdout=full, stdin=subprocess.DEVNULL)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (2, "bothways: output: no space left on device\n"), arguments


def test_a_reader_that_has_gone_ends_it_quietly(runs: Path, tmp_path: Path) -> None:
    """`bothways decode ... | head -1`"""
    many = write_lines(tmp_path / "many", ["a b c"] * 4_000)
    arguments = ["decode", runs / "transformer-l2r", "--input", many, "--quiet", "--device", "cpu", "--batch", 8]
    process = start(*arguments, "--format", "jsonl", stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline().startswith('{"source": "a b c"')
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "" and process.wait(timeout=60) == 1
    process.stderr.close()


def test_ctrl_c_while_decoding(runs: Path) -> None:
    process = start("decode", runs / "transformer-l2r", "--device", "cpu", "--batch", 1, stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write("a\n" * 16)  # a window, whose results come before it waits for more
    process.stdin.flush()
    watchdog = Timer(60, process.kill)
    watchdog.start()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    watchdog.cancel()
    assert (process.returncode, err) == (130, "bothways: interrupted\n")


def test_help_and_version(say: Say) -> None:
    assert say("--version")[0] == 0
    assert say()[0] == 0 and say()[1] == say("--help")[1] and "prepare" in say()[1]
    for name in ("prepare", "check", "train", "decode", "tune", "score", "average", "demo", "bench", "systems"):
        code, out, err = say(name, "--help")
        assert code == 0 and "Example" in out and not err, name
    assert (ROOT / "docs" / "options.md").exists()  # which the help of `train` names
