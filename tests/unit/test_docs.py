"""What the documentation says is true: every place in the code, every command, configuration, file and option.

`python tests/unit/test_docs.py` rewrites the line numbers of places that have moved.
"""

import ast
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

sys.path.extend(str(folder) for folder in Path(__file__).parents[1:3])  # as pytest is told to, for when it is not there

from corpus import pairs, write_lines

from bothways import cli
from bothways.config import SECTIONS, changed, load, parse
from bothways.evaluate.scores import METRICS
from bothways.models.table import SYSTEMS, resolve

ROOT = Path(__file__).parents[2]
DOCS = ("README.md", "docs/guide.md", "docs/paper.md", "docs/design.md")
PAGES = (*DOCS, "CHANGELOG.md", "docs/report.md", "docs/results.md", "docs/scores.md", "docs/speed.md")
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
PLACE = re.compile(  # `bothways/nn/attention.py:19` (`partner`), or (`symbol`: `code on a line of it`)
    r"`(?P<file>bothways/[\w/]+\.py):(?P<line>\d+)`\s+"
    r"\(`(?P<symbol>[\w.]+)`(?::\s+`(?P<code>[^`]+)`)?\)"
)
EQUATIONS = 30


def text(doc: str) -> str:
    return (ROOT / doc).read_text(encoding="utf-8")


def blocks(doc: str, language: str) -> list[str]:
    """What stands between ```language and ```."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(doc), re.MULTILINE | re.DOTALL)


# -- places in the code ------------------------------------------------------------------------------------------------


@cache
def definitions(file: str) -> dict[str, ast.stmt]:
    """Every class, function and named value of a file: qualified name -> its node."""
    found: dict[str, ast.stmt] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[prefix + node.name] = node
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update({prefix + name.id: node for name in node.targets if isinstance(name, ast.Name)})
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[prefix + node.target.id] = node

    visit(ast.parse(text(file)).body, "")
    return found


def true_line(file: str, symbol: str, code: str | None) -> int:
    """Where the symbol is defined, or the only line of its definition that holds `code`; LookupError if there is none.

    Where several lines hold it, the one that consists of nothing else counts.
    """
    if not (ROOT / file).is_file():
        raise LookupError(f"there is no file {file}")
    node = definitions(file).get(symbol)
    if node is None:
        raise LookupError(f"{file} defines no {symbol}")
    if code is None:
        return node.lineno
    lines = text(file).splitlines()[: node.end_lineno]
    holding = [n for n, line in enumerate(lines, 1) if n >= node.lineno and code in line]
    exact = [n for n in holding if lines[n - 1].strip() == code]
    if len(exact or holding) != 1:
        raise LookupError(f"{file}: {len(holding)} lines of {symbol} hold `{code}`; it must be one")
    return (exact or holding)[0]


def places(doc: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Every place that a page names, with the page's line."""
    page = text(doc)
    for found in PLACE.finditer(page):
        yield page.count("\n", 0, found.start()) + 1, found


@pytest.mark.parametrize("doc", DOCS)
def test_every_place_is_where_the_page_says(doc: str) -> None:
    wrong = []
    for number, place in places(doc):
        try:
            line = true_line(place["file"], place["symbol"], place["code"])
        except LookupError as error:
            wrong.append(f"{doc}, line {number}: {error}")
            continue
        if line != int(place["line"]):
            wrong.append(f"{doc}, line {number}: `{place['symbol']}` is at {place['file']}:{line}, not {place['line']}")
    assert not wrong, "\n".join([*wrong, "`python tests/unit/test_docs.py` rewrites line numbers"])


@pytest.mark.parametrize("doc", DOCS)
def test_a_line_number_comes_with_a_symbol(doc: str) -> None:
    assert len(re.findall(r"\w\.py:\d+", text(doc))) == len(list(places(doc)))


@pytest.mark.parametrize("doc", PAGES)
def test_files_that_are_named_exist(doc: str) -> None:
    named = re.findall(r"`((?:bothways|docs|tests|recipes)/[\w./-]+)", text(doc))
    links = [link for link in re.findall(r"\]\(([\w./-]+)\)", text(doc)) if not link.startswith("http")]
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in links if not ((ROOT / doc).parent / link).exists()]
    assert not missing


def refreshed(doc: str) -> str:
    """The page with every line number as it should be."""

    def renumber(place: re.Match[str]) -> str:
        line = true_line(place["file"], place["symbol"], place["code"])
        return place[0].replace(f":{place['line']}`", f":{line}`", 1)

    return PLACE.sub(renumber, text(doc))


def test_a_place_that_moved_is_found_again() -> None:
    for file, symbol, code, expected in (
        ("bothways/nn/attention.py", "partner", None, "def partner("),
        ("bothways/nn/attention.py", "SynchronousAttention._past", None, "def _past("),
        ("bothways/search/beam.py", "CHECK_EVERY", None, "CHECK_EVERY ="),
        ("bothways/nn/fusion.py", "Tanh", "return torch.tanh(future)", "return torch.tanh(future)"),
    ):
        line = text(file).splitlines()[true_line(file, symbol, code) - 1]
        assert expected in line
    for symbol, code in (("nobody", None), ("Tanh", "no such code"), ("Gate", "head_width")):
        with pytest.raises(LookupError):
            true_line("bothways/nn/fusion.py", symbol, code)


# -- the map of the paper ----------------------------------------------------------------------------------------------


def rows_of_map() -> dict[int, str]:
    """Equation number -> its row."""
    found = re.findall(r"^\| \((\d+)\) \|(.*)$", text("docs/paper.md"), re.MULTILINE)
    assert len(found) == len(dict(found)), "an equation has two rows"
    return {int(number): row for number, row in found}


def test_every_equation_is_in_the_map() -> None:
    rows = rows_of_map()
    assert sorted(rows) == list(range(1, EQUATIONS + 1))
    for number, row in rows.items():
        assert PLACE.search(row), f"equation {number} needs a place"


def test_every_algorithm_and_strategy_is_in_the_map() -> None:
    page = text("docs/paper.md")
    for name in ("Algorithm 1", "Algorithm 2", "Algorithm 3", "Two-pass training", "Fine-tuning"):
        assert re.search(rf"^#+ {name}", page, re.MULTILINE), f"no section on {name}"


# -- commands and configurations ---------------------------------------------------------------------------------------


@dataclass
class Command:
    """One `bothways` command of a shell line, with what < and > name."""

    words: list[str]
    stdin: str | None = None
    stdout: str | None = None
    doc: str = field(default="", compare=False)


def commands(shell: str, doc: str = "") -> list[Command]:
    """The `bothways` commands of some shell lines; of `make` and the like nothing."""
    found = []
    for line in shell.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        parts: list[list[str]] = [[]]
        for word in lexer:
            if word in ("|", "&&", ";"):
                parts.append([])
            else:
                parts[-1].append(word)
        for part in parts:
            given: dict[str, str] = {}
            for sign, name in (("<", "stdin"), (">", "stdout")):
                if sign in part:
                    at = part.index(sign)
                    given[name] = part[at + 1]
                    del part[at : at + 2]
            if "-m" in part and part[part.index("-m") + 1] == "bothways":  # torchrun ... -m bothways
                part = part[part.index("-m") + 1 :]
            if part[:1] == ["bothways"]:
                found.append(Command(part[1:], **given, doc=doc))
    return found


def written_commands() -> list[Command]:
    """Every command in a block of shell, and every one in running text that has arguments."""
    found = []
    for doc in DOCS:
        found += [command for block in blocks(doc, "sh") for command in commands(block, doc)]
        prose = re.sub(r"^```.*?^```$", "", text(doc), flags=re.MULTILINE | re.DOTALL)
        found += [command for line in re.findall(r"`(bothways [^`]+)`", prose) for command in commands(line, doc)]
    recipes = sorted((ROOT / "recipes").rglob("*.yaml"))
    for recipe in recipes:
        comment = "".join(re.findall(r"^# ?(.*\n)", recipe.read_text(encoding="utf-8"), re.MULTILINE))
        found += commands("\n".join(re.findall(r"^ +(bothways (?:.*\\\n)*.*)$", comment, re.MULTILINE)), recipe.name)
    return found


@pytest.mark.parametrize("command", written_commands(), ids=lambda command: f"{command.doc}: {' '.join(command.words)}")
def test_command_is_one(command: Command, tmp_path: Path) -> None:
    name, *arguments = cli._join_words(command.words)
    if name in ("--version", "--help"):
        return
    assert name in COMMANDS
    if not arguments:
        return  # its name, in running text
    context = COMMANDS[name].make_context(name, arguments)
    metrics = context.params.get("metric") or ()
    unknown = {metrics} - set(METRICS) if isinstance(metrics, str) else set(metrics) - set(METRICS)
    assert not unknown
    cli._sets("--valid", context.params.get("valid"))
    cli._sets("--test", context.params.get("test"))
    if name == "train":
        config = tmp_path / "config.yaml"
        config.write_text("system: bift\ndata: data\nstrategy: {name: fine-tuning}\n", encoding="utf-8")
        load(config, cli._overrides(context.args))
    elif name == "decode":
        given = ("beam", "nbest", "direction", "length_penalty")
        options = {key: context.params[key] for key in given if context.params[key] is not None}
        changed(parse({"system": "bift", "data": "data"}), search=options | cli._search_options(context.args))


def test_commands_are_read_as_a_shell_would() -> None:
    shell = (
        "make demo\ncut -f1 x | bothways decode run/ --beam 8 \\\n  > out  # comment\ntorchrun -m bothways train c < i"
    )
    expected = [Command(["decode", "run/", "--beam", "8"], stdout="out"), Command(["train", "c"], stdin="i")]
    assert commands(shell) == expected


@pytest.mark.parametrize("target", sorted({t for doc in DOCS for t in re.findall(r"\bmake (\w+)`", text(doc))}))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", text("Makefile"), re.MULTILINE)


@pytest.mark.parametrize("doc", DOCS)
def test_yaml_is_a_configuration(doc: str, tmp_path: Path) -> None:
    for block in blocks(doc, "yaml"):
        path = tmp_path / "config.yaml"
        path.write_text(block, encoding="utf-8")
        raw = yaml.safe_load(block)  # a part of a file is completed
        missing = {key: value for key, value in {"system": "bift", "data": "data"}.items() if key not in raw}
        resolve(load(path, **missing))


@pytest.mark.parametrize("doc", [*DOCS, "CHANGELOG.md"])
def test_options_that_are_named_exist(doc: str) -> None:
    named = set(re.findall(r"`(?:--)?(model|search|train|strategy)\.(\w+)", text(doc)))
    named -= {(section, "option") for section in SECTIONS}  # `--search.option=value` stands for any
    known = {name: {f.alias or key for key, f in section.model_fields.items()} for name, section in SECTIONS.items()}
    assert not [f"{section}.{option}" for section, option in named if option not in known[section]]


@pytest.mark.parametrize("doc", DOCS)
def test_python_is_python(doc: str) -> None:
    for block in blocks(doc, "python"):
        ast.parse(block)


def test_every_command_shows_an_example_and_can_be_quiet() -> None:
    assert all("Example" in (command.help or "") for command in COMMANDS.values())
    assert all("quiet" in {option.name for option in command.params} for command in COMMANDS.values())


def test_every_command_is_in_the_guide() -> None:
    explained = {command.words[0] for block in blocks("docs/guide.md", "sh") for command in commands(block)}
    assert set(COMMANDS) - explained == set()


# -- the README --------------------------------------------------------------------------------------------------------


def tree() -> dict[str, str]:
    """The README's file tree: path -> comment; a folder's path ends with a slash."""
    (block,) = [block for block in blocks("README.md", "text") if block.startswith("bothways/")]
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in block.splitlines():
        indented, comment = re.split(r"(?<=\S) {2,}", line, maxsplit=1)
        depth = (len(indented) - len(indented.lstrip())) // 2
        folders = [*folders[:depth], indented.strip()]
        found["".join(folders)] = comment
    return found


def test_the_file_tree_is_the_package() -> None:
    written = {path for path in tree() if path.startswith("bothways/") and path.endswith(".py")}
    files = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "bothways").rglob("*.py")
        # A folder's line stands for an __init__.py that only says what the folder is for.
        if file.name != "__init__.py" or len(ast.parse(file.read_text(encoding="utf-8")).body) > 1
    }
    assert sorted(files - written) == [], "missing in the README's file tree"
    assert sorted(written - files) == [], "in the README's file tree, but not in the package"


def test_the_file_tree_exists_and_is_explained() -> None:
    assert [path for path in tree() if not (ROOT / path).exists()] == []
    assert all(tree().values())


def test_the_table_of_systems_is_the_programs() -> None:
    (section,) = re.findall(r"^## Systems\n(.*?)^## ", text("README.md"), re.MULTILINE | re.DOTALL)
    written = dict(re.findall(r"^\| `([\w-]+)` \| (.+?) \|", section, re.MULTILINE))
    assert written == {name: system.meaning for name, system in SYSTEMS.items()}


def test_the_readmes_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny corpus, its configuration made small: prepare, train, decode, score, and the lines of Python."""
    page = text("README.md").partition("## Your own text")[2].partition("\n## ")[0]
    rows = pairs(80)
    for name, part in (("train", rows[:60]), ("dev", rows[60:70]), ("test", rows[70:])):
        write_lines(tmp_path / f"{name}.en", [source for source, _ in part])
        write_lines(tmp_path / f"{name}.de", [target for _, target in part])
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    config = yaml.safe_load(block)
    config["model"] = {"encoder_layers": 1, "decoder_layers": 1, "width": 8, "heads": 2, "feed_forward": 8}
    config["train"] |= {"updates": 2, "batch_tokens": 200}
    config["search"] = {"max_length": 5}
    config["strategy"]["updates"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lines = [c for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) for c in commands(block)]
    assert {"prepare", "train", "decode", "score"} <= {line.words[0] for line in lines}
    for line in lines:
        monkeypatch.setattr("sys.argv", ["bothways", *line.words])
        stdin = (tmp_path / line.stdin).read_bytes() if line.stdin else b""
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        assert not left.value.code, f"{' '.join(line.words)}: {err}"
        if line.stdout:
            (tmp_path / line.stdout).write_text(out, encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(block, {})
    assert (tmp_path / "out.de").read_text(encoding="utf-8").count("\n") == 10


if __name__ == "__main__":
    for page in DOCS:
        (ROOT / page).write_text(refreshed(page), encoding="utf-8")
