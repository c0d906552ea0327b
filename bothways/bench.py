"""Decoding speed with random weights: shape, device and batch sizes in; sentences per second of every system out.

Everyone does the same work: an encoder-decoder Transformer of one shape, one vocabulary of 32,000, sources of 25 tokens
on average, beam 4, and exactly 30 tokens out, because the end mark is made impossible. Systems take turns, so that a
machine that slows down slows all of them; only figures of one run are to be compared. Systems of two passes put out
30 tokens in each of them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bothways.config import PRESETS, Config, ModelConfig, SearchConfig, parse
from bothways.errors import ConfigError
from bothways.models.ensemble import Panel
from bothways.models.interface import Memory, Seq2Seq, State, TwoPass
from bothways.models.table import SYSTEMS, build, resolve
from bothways.rescoring import padded
from bothways.search.beam import Plan, search
from bothways.tokens import DIRECTIONS, END, L2R, PAD, R2L, SPECIAL_TOKENS
from bothways.translator import decode as decode_texts
from bothways.translator import first_pass

VOCABULARY = 32_000
BEAM = 4
TOKENS_OUT = 30
SHORTEST, LONGEST = 15, 35  # tokens of a source; every length is as frequent as the others
OURS = ("transformer-l2r", "bift")  # unless others are named
SAME_SIZE = 0.02  # by how much a peer's number of parameters may differ from ours
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One measurement."""

    peer: str  # whose decoder it is; `bothways` is ours
    system: str
    shape: str
    device: str
    dtype: str
    batch: int  # sentences decoded together
    beam: int
    sentences_per_second: float  # median of the repeats
    spread: float  # (largest - smallest) / median


@dataclass(frozen=True)
class Contender:
    """A model that is ready to decode."""

    peer: str
    system: str
    parameters: int
    decode: Callable[[Tensor], list[int]]  # sources [B, S] -> how many tokens each sentence's best output has


def run(
    shape: str,
    device: str,
    batches: Sequence[int],
    peers: Sequence[str],
    precision: str,
    repeats: int,
    say: Callable[[str], None],
    systems: Sequence[str] = OURS,
) -> list[Row]:
    """Measure our systems and the peers, in turns; rows by batch size, then by contender."""
    for name, value, accepted in (("shape", shape, PRESETS), ("precision", precision, DTYPES)):
        if value not in accepted:
            raise ConfigError(f"{name}: must be one of {', '.join(accepted)}, got {value!r}")
    for peer in peers:
        if peer not in PEERS:
            raise ConfigError(f"against: must be any of {', '.join(PEERS)}, got {peer!r}")
    for system in systems or [""]:
        if system not in SYSTEMS:
            raise ConfigError(f"system: must be any of {', '.join(SYSTEMS)}, got {system!r}")
    if min([repeats, *batches]) < 1:
        raise ConfigError(f"batch and repeats: must be at least 1, got {list(batches)} and {repeats}")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device: must be cpu, or cuda on a machine with a GPU, got {device!r}")
    torch.manual_seed(1)
    place, dtype = torch.device(device), DTYPES[precision]
    contenders = [_ours(system, shape, place, dtype) for system in systems]
    contenders += [PEERS[peer](_model_config(systems[0], shape), place, dtype) for peer in peers]
    _must_have_one_size(contenders)
    rows = []
    for batch in batches:
        sources = _sources(batch).to(place)
        times: list[list[float]] = [[] for _ in contenders]
        for repeat in range(repeats + 1):
            for contender, seconds in zip(contenders, times, strict=True):
                taken = _timed(contender, sources)
                if repeat:  # the first time is for warming up
                    seconds.append(taken)
            say(f"batch {batch}: {f'measured {repeat} of {repeats}' if repeat else 'warmed up'}")
        for contender, seconds in zip(contenders, times, strict=True):
            median = statistics.median(seconds)
            spread = (max(seconds) - min(seconds)) / median
            labels = contender.peer, contender.system, shape, device, precision, batch, BEAM
            rows.append(Row(*labels, batch / median, spread))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Rows for a person to read; speeds also as a share of the first system's at the same batch size."""
    head = ["peer", "system", "shape", "device", "dtype", "batch", "beam", "sentences/s", "spread", "ratio"]
    first = (rows[0].peer, rows[0].system)
    base = {row.batch: row.sentences_per_second for row in rows if (row.peer, row.system) == first}
    lines = [head]
    for row in rows:
        speed = row.sentences_per_second
        labels = [row.peer, row.system, row.shape, row.device, row.dtype, str(row.batch), str(row.beam)]
        lines.append([*labels, f"{speed:,.2f}", f"{row.spread:.0%}", f"{speed / base[row.batch]:.2f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = 5  # columns that are words; the rest are numbers
    return "\n".join(
        "  ".join(x.ljust(w) if i < texts else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def _sources(batch: int) -> Tensor:
    """Random sentences [B, S], each with its end mark; lengths spread evenly, the same ones every time."""
    generator = torch.Generator().manual_seed(batch)
    lengths = [SHORTEST + int((LONGEST - SHORTEST + 1) * (i + 0.5) / batch) for i in range(batch)]
    words = [torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return padded([[*sentence, END] for sentence in words])


def _timed(contender: Contender, sources: Tensor) -> float:
    """Seconds for one batch."""
    began = time.perf_counter()
    lengths = contender.decode(sources)  # outputs are lists of the CPU: by then a GPU has finished
    seconds = time.perf_counter() - began
    if lengths != [TOKENS_OUT] * len(sources):
        raise ConfigError(
            f"{contender.peer} {contender.system} does not do the same work: it generated {min(lengths)} to "
            f"{max(lengths)} tokens per sentence instead of {TOKENS_OUT}"
        )
    return seconds


def _must_have_one_size(contenders: Sequence[Contender]) -> None:
    expected = contenders[0].parameters
    for contender in contenders:
        if contender.peer != contenders[0].peer and abs(contender.parameters - expected) > SAME_SIZE * expected:
            raise ConfigError(
                f"{contender.peer} {contender.system} does not do the same work: it has {contender.parameters:,} "
                f"parameters, {contenders[0].system} has {expected:,}"
            )


# -- ours --------------------------------------------------------------------------------------------------------------


def _ours(system: str, shape: str, device: torch.device, dtype: torch.dtype) -> Contender:
    if system == "rerank":
        return _rerank(shape, device, dtype)
    config = _config(system, shape)
    model = build(config, VOCABULARY, VOCABULARY).to(device, dtype).eval()
    directions = DIRECTIONS[config.search.direction or "both"]
    # A sentence of 29 tokens takes 30 steps: what the last one chooses stands where an end mark would have to.
    settings = SearchConfig(beam=BEAM, max_length=TOKENS_OUT - 1)
    slots = Plan.of(settings, directions).slots
    for one in (model, model.first) if isinstance(model, TwoPass) else (model,):
        _never_ends(one)

    def decode(sources: Tensor) -> list[int]:
        limits = torch.full((len(sources),), TOKENS_OUT - 1, device=device)
        with torch.inference_mode():
            memory = model.encode(sources)
            if isinstance(model, TwoPass):
                memory, _ = first_pass(model, memory, limits, settings)
            state = model.start(memory, len(directions), slots)
            found = search(model.step, state, limits, directions, settings)
        return [len(one.hypotheses[0].tokens) + one.hypotheses[0].cut_off for one in found]

    return Contender("bothways", system, model.parameter_count(), decode)


def _never_ends(model: Seq2Seq) -> None:
    """The end mark becomes impossible."""
    log_probs = model.log_probs

    def without_end(hidden: Tensor) -> Tensor:
        found = log_probs(hidden)
        found[..., END] = -torch.inf
        return found

    model.log_probs = without_end  # type: ignore[method-assign]


def _rerank(shape: str, device: torch.device, dtype: torch.dtype) -> Contender:
    """Two models search, and both judge what they have found: complete hypotheses, which end at the last step."""
    systems = ("transformer-l2r", "transformer-r2l")
    models = [build(_config(system, shape), VOCABULARY, VOCABULARY).to(device, dtype).eval() for system in systems]
    for model in models:
        _ends_with(TOKENS_OUT, model)
    panel = Panel(models, [(L2R,), (R2L,)])

    def decode(sources: Tensor) -> list[int]:
        texts = [[token for token in row if token not in (PAD, END)] for row in sources.tolist()]
        settings = SearchConfig(beam=BEAM, max_length=TOKENS_OUT - 1, batch_sentences=len(texts))
        found = dict(decode_texts(panel, texts, (L2R, R2L), settings, device))
        return [len(found[i].hypotheses[0].tokens) + 1 for i in range(len(texts))]  # with the end mark

    return Contender("bothways", "rerank", panel.parameter_count(), decode)


def _ends_with(step: int, model: Seq2Seq) -> None:
    """Every hypothesis ends at this step, and none before it."""
    taken, begin, go_on = 0, model.start, model.step

    def start(memory: Memory, directions: int, hypotheses: int) -> State:
        nonlocal taken
        taken = 0
        return begin(memory, directions, hypotheses)

    def count_step(
        tokens: Tensor, state: State, partners: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, State]:
        nonlocal taken
        taken += 1
        log_probs, state = go_on(tokens, state, partners, weights)
        end = torch.arange(log_probs.size(-1), device=log_probs.device) == END
        return log_probs.masked_fill_(end if taken < step else ~end, -torch.inf), state

    model.start, model.step = start, count_step  # type: ignore[method-assign]


def _model_config(system: str, shape: str) -> ModelConfig:
    return _config(system, shape).model


def _config(system: str, shape: str) -> Config:
    return resolve(parse({"system": system, "data": "random", "model": {"preset": shape}}))


# -- peers -------------------------------------------------------------------------------------------------------------


def _installed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(f"against: {package} is not installed; in a checkout: pip install -e '.[bench]'") from None


def _transformers(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Contender:
    """MarianMT of Hugging Face transformers, as `generate` runs it by default."""
    transformers = _installed("transformers")
    same = transformers.MarianConfig(
        vocab_size=VOCABULARY,
        d_model=config.width,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.heads,
        decoder_attention_heads=config.heads,
        encoder_ffn_dim=config.feed_forward,
        decoder_ffn_dim=config.feed_forward,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=LONGEST + TOKENS_OUT,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
    )
    model = transformers.MarianMTModel(same).to(device, dtype).eval()
    model.generation_config = transformers.GenerationConfig(
        num_beams=BEAM,
        min_new_tokens=TOKENS_OUT,
        max_new_tokens=TOKENS_OUT,
        length_penalty=0.6,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )

    def decode(sources: Tensor) -> list[int]:
        with torch.inference_mode():
            found = model.generate(sources, attention_mask=(sources != PAD).long())
        return [len(tokens) - 1 for tokens in found.tolist()]  # less the start token

    return Contender("transformers", "MarianMT", sum(p.numel() for p in model.parameters()), decode)


PEERS: dict[str, Callable[[ModelConfig, torch.device, torch.dtype], Contender]] = {"transformers": _transformers}
