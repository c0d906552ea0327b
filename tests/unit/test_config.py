"""Configurations: presets, overrides, what YAML means, what is refused, and that every option is explained."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from corpus import ROOT

from bothways import config as configuration
from bothways.config import (
    PRESETS,
    RNN_PRESETS,
    SECTIONS,
    Config,
    changed,
    dump,
    load,
    parse,
    presets_of,
    reference,
    split_override,
)
from bothways.errors import ConfigError
from bothways.models.table import SYSTEMS, resolve

LEAST = {"system": "bift", "data": "data/"}


@pytest.mark.parametrize("system, name", [*product(["bift"], PRESETS), *product(["bi-rnmt", "rnmt-l2r"], RNN_PRESETS)])
def test_presets_fill_in_and_give_way(system: str, name: str) -> None:
    preset = presets_of(system)[name]
    filled = parse({**LEAST, "system": system, "model": {"preset": name}}).model.model_dump()
    assert {key: filled[key] for key in preset} == preset
    other = parse({**LEAST, "system": system, "model": {"preset": name, "decoder_layers": 3}}).model
    assert (other.decoder_layers, other.width) == (3, preset["width"])


def test_presets_are_those_of_the_paper_and_of_the_guide() -> None:
    shapes = {name: tuple(shape.values()) for name, shape in PRESETS.items()}
    assert shapes == {
        "tiny": (2, 2, 128, 4, 512),
        "small": (4, 4, 256, 4, 1024),
        "base": (6, 6, 512, 8, 2048),
        "big": (6, 6, 1024, 16, 4096),
    }
    shapes = {name: tuple(shape.values()) for name, shape in RNN_PRESETS.items()}
    assert shapes == {"tiny": (1, 1, 192, 0.2), "small": (2, 2, 384, 0.2), "paper": (2, 2, 1000, 0.2)}


def test_an_lstm_has_no_heads_that_its_width_must_fit() -> None:
    assert parse({"system": "bi-rnmt", "data": "d", "model": {"width": 15}}).model.width == 15


def test_a_file_then_overrides_then_what_the_program_fills_in(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("system: bift\ndata: d\nsearch: {beam: 8}\nmodel: {preset: tiny}\n", encoding="utf-8")
    found = load(path, ["--search.beam=2", "search.nbest=2", "--model.preset=small", "--system=no-interaction"])
    assert (found.search.beam, found.search.nbest, found.model.width, found.system) == (2, 2, 256, "no-interaction")
    assert load(path, data="other").data == "other"
    assert load(None, ["--system=bift", "--data=d", "--strategy.name=fine-tuning"]).strategy is not None


@pytest.mark.parametrize(
    "override, expected",
    [
        ("--a.b=1", ("a.b", 1)),
        ("a=1e-3", ("a", 0.001)),
        ("a=1e-9", ("a", 1e-9)),
        ("a=-2E+5", ("a", -2e5)),
        ("a=.5e1", ("a", 5.0)),
        ("a=1.e3", ("a", 1000.0)),
        ("a=1e", ("a", "1e")),
        ("a=e3", ("a", "e3")),
        ("a=run/1e-3", ("a", "run/1e-3")),
        ("a=0.1", ("a", 0.1)),
        ("a=true", ("a", True)),
        ("a=", ("a", None)),
        ("a=null", ("a", None)),
        ("a=b=c", ("a", "b=c")),
        ("a=[0.9, 0.98]", ("a", [0.9, 0.98])),
        ("a='3'", ("a", "3")),
    ],
)
def test_values_of_overrides(override: str, expected: tuple[str, Any]) -> None:
    found = split_override(override)
    assert found == expected and type(found[1]) is type(expected[1])


def test_numbers_of_a_file(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-3 for text."""
    path = tmp_path / "config.yaml"
    path.write_text("system: bift\ndata: d\ntrain: {learning_rate: 1e-3, adam_epsilon: 1e-9, clip: 1}\n")
    train = load(path).train
    assert (train.learning_rate, train.adam_epsilon, train.clip) == (0.001, 1e-9, 1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sytem": "x"}, r"^where: sytem: unknown key; accepted here: system, data, decoded, model, .*strategy, runs$"),
        ({"model": {"widht": 3}}, r"^where: model\.widht: unknown key; accepted here: preset, .*future_span$"),
        ({"search": {"bean": 3}}, r"search\.bean: unknown key; accepted here: direction, beam, greedy"),
        ({"strategy": {"name": "fine-tuning", "shared": 1}}, r"strategy\.shared: unknown key; accepted here: name,"),
        ({"model": {"width": "512"}}, r"model\.width: must be a valid integer, got '512'$"),
        ({"model": {"width": True}}, r"model\.width: must be a valid integer, got True$"),
        ({"model": {"width": 15, "heads": 3}}, r"model\.width: must be even \(.*\), got 15$"),
        ({"model": {"width": 16, "heads": 3}}, r"model\.width: must be a multiple of heads \(3\), got 16$"),
        ({"model": {"future_span": "current"}}, r"model\.future_span: does not belong to bift, got 'current'$"),
        (
            {"model": {"preset": "paper"}},
            r"model\.preset: must be one of tiny, .*, big for bift, got 'paper'$",
        ),
        ({"system": "rnmt-l2r", "model": {"heads": 4}}, r"model\.heads: does not belong to rnmt-l2r, got 4$"),
        (
            {"system": "bi-rnmt", "model": {"preset": "base"}},
            r"model\.preset: must be one of tiny, small, paper for bi-rnmt, got 'base'$",
        ),
        ({"search": {"beam": 3, "direction": "both"}}, r"search\.beam: must be even when both .*, got 3$"),
        ({"search": {"beam": 3, "nbest": 4}}, r"search\.nbest: must be at most beam \(3\), got 4$"),
        ({"search": {"greedy": "yes"}}, r"search\.greedy: must be a valid boolean, got 'yes'$"),
        ({"train": {"learning_rate": 0}}, r"train\.learning_rate: must be greater than 0, got 0$"),
        ({"train": {"learning_rate": float("inf")}}, r"train\.learning_rate: must be a finite number, got inf$"),
        ({"train": {"adam_betas": [0.9]}}, r"train\.adam_betas: .*at least 2 items.*, got \[0\.9\]$"),
        ({"train": {"adam_betas": [0.9, 1.0]}}, r"train\.adam_betas\.1: must be less than 1, got 1\.0$"),
        ({"train": {"precision": "fp16"}}, r"train\.precision: must be 'float32' or 'bfloat16', got 'fp16'$"),
        ({"train": {"seed": -1}}, r"train\.seed: must be greater than or equal to 0, got -1$"),
        ({"train": {"seed": 2**64}}, r"train\.seed: must be less than"),
        ({"strategy": {"share": 0.5}}, r"strategy\.name: is required$"),
        ({"strategy": {"name": "fine-tuning", "share": 0}}, r"strategy\.share: must be greater than 0, got 0$"),
        ({"data": None}, r"^where: data: must be a valid string, got None$"),
        ({"train": {"updates": 0, "clip": -1}}, r"train\.updates: .*, got 0; train\.clip: .*, got -1$"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse({**LEAST, **change}, where="where")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["--search.beam", "beam", "=3", "--=3"])
def test_an_override_without_name_or_value(override: str) -> None:
    with pytest.raises(ConfigError, match=r"must have the form --section\.option=value, for instance --search\.beam=4"):
        split_override(override)


def test_what_is_dumped_is_read_again_as_the_same() -> None:
    for system in SYSTEMS:
        own = {"future_span": "current"} if "rnmt" in system else {"future_weight": 1e-7}
        model = {"preset": "tiny", "dropout": 0.3, **own}
        strategy = {"strategy": {"name": "fine-tuning", "learning_rate": 1e-05}} if system.startswith("bi") else {}
        runs = {"runs": ["one/", "é: #2"]} if SYSTEMS[system].of_runs else {}
        config = resolve(parse({"system": system, "data": "ä: #1", "model": model, **strategy, **runs}))
        again = parse(yaml.safe_load(dump(config)))
        assert again == config and resolve(again) == config


def test_a_dumped_file_is_loaded_as_the_same(tmp_path: Path) -> None:
    """Through the loader with its own idea of numbers."""
    config = parse({**LEAST, "train": {"learning_rate": 1e-05, "adam_epsilon": 1e-09, "start_from": "1e-3"}})
    path = tmp_path / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


def test_changing_checks_anew() -> None:
    config = parse(LEAST)
    other = changed(config, search={"beam": 6}, data="elsewhere")
    assert (other.search.beam, other.search.nbest, other.data) == (6, 1, "elsewhere") and config.search.beam == 4
    with pytest.raises(ConfigError, match=r"search\.nbest: must be at most beam \(4\), got 5"):
        changed(config, search={"nbest": 5})


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(LEAST).search.beam = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", *SECTIONS])
def test_every_option_is_explained(name: str) -> None:
    section = SECTIONS.get(name, Config)
    for key, field in section.model_fields.items():
        assert field.description and field.description.endswith("."), f"{name}.{key} has no docstring"


def test_sections_are_the_sections() -> None:
    found = {
        name: field.annotation
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, configuration.Section)
    }
    assert {**found, "strategy": configuration.StrategyConfig} == SECTIONS


def test_the_page_of_options_is_up_to_date() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == reference(), "write it again: python -m bothways.config > docs/options.md"
    assert "| `search.beam` | whole number, >= 1 | `4` | Hypotheses kept per sentence." in page
