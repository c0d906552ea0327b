"""Speed with random weights: shape, device and batch sizes in; sentences per second of every system out.

Everyone does the same work: an encoder-decoder Transformer of one shape, one vocabulary of 32,000, sources of 25 tokens
on average, one beam, and exactly 30 tokens out, because the end mark is made impossible. Systems take turns, so that a
machine that slows down slows all of them; only figures of one run are to be compared. Systems of two passes or of two
models put out 30 tokens in each of them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bothways.config import PRESETS, RNN_PRESETS, SearchConfig, parse
from bothways.errors import ConfigError
from bothways.models.ensemble import Panel
from bothways.models.interface import Seq2Seq, TwoPass
from bothways.models.table import SYSTEMS, build, resolve
from bothways.models.transformer import Transformer
from bothways.peers import PEERS, Contender, Work
from bothways.stepwise import Distribution, State
from bothways.tokens import DIRECTIONS, END, SPECIAL_TOKENS
from bothways.translator import decode, settle

VOCABULARY = 32_000
TOKENS_OUT = 30
SHORTEST, LONGEST = 15, 35  # tokens of a source; every length is as frequent as the others
OURS = ("transformer-l2r", "bift")  # unless others are named
SAME_SIZE = 0.02  # by how much a peer's number of parameters may differ from ours
PRECISIONS = {"cpu": ("float32", "bfloat16", "int8"), "cuda": ("float32", "bfloat16")}
SHAPES = PRESETS | RNN_PRESETS  # by name; `paper` is of LSTMs
WARM_UPS = {"cpu": 1, "cuda": 3}  # before measuring: on a GPU the first two record what is replayed from then on
FEWEST = 8  # sentences decoded in one measurement, so that it takes long enough to be measured


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


def run(
    shape: str,
    device: str,
    batches: Sequence[int],
    peers: Sequence[str],
    precisions: Sequence[str],
    beam: int,
    repeats: int,
    say: Callable[[str], None],
    systems: Sequence[str] = OURS,
) -> list[Row]:
    """Measure our systems and the peers, in turns; rows by batch size, then by contender."""
    check_machine(shape, device, precisions)
    for peer in peers:
        if peer not in PEERS:
            raise ConfigError(f"against: must be any of {', '.join(PEERS)}, got {peer!r}")
    for system in systems or [""]:
        if system not in SYSTEMS or system == "ensemble":
            known = [name for name in SYSTEMS if name != "ensemble"]
            raise ConfigError(f"system: must be any of {', '.join(known)}, got {system!r}")
    if min([repeats, *batches]) < 1:
        raise ConfigError(f"batch and repeats: must be at least 1, got {list(batches)} and {repeats}")
    contenders = []
    for precision in precisions:
        work = Work(shape, torch.device(device), precision, beam, TOKENS_OUT, LONGEST + 1)
        contenders += [_ours(system, work) for system in systems]
        contenders += [one for peer in peers for one in PEERS[peer](random_transformer(shape), work)]
    _must_have_one_size(contenders)
    settle()  # as `bothways decode` does
    rows = []
    for batch in batches:
        sources = _sources(_at_once(batch, device))
        times: list[list[float]] = [[] for _ in contenders]
        for repeat in range(1 - WARM_UPS[device], repeats + 1):
            for contender, seconds in zip(contenders, times, strict=True):
                taken = _timed(contender, sources, batch)
                if repeat > 0:
                    seconds.append(taken)
            if repeat >= 0:
                say(f"batch {batch}: {f'measured {repeat} of {repeats}' if repeat else 'warmed up'}")
        for contender, seconds in zip(contenders, times, strict=True):
            median = statistics.median(seconds)
            spread = (max(seconds) - min(seconds)) / median
            labels = contender.peer, contender.system, shape, device, contender.dtype, batch, beam
            rows.append(Row(*labels, len(sources) / median, spread))
    return rows


def check_machine(shape: str, device: str, precisions: Sequence[str]) -> None:
    """What is asked for can be measured here."""
    if device not in PRECISIONS or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device: must be cpu, or cuda on a machine with a GPU, got {device!r}")
    for name, values, accepted in (("shape", [shape], SHAPES), ("precision", precisions, PRECISIONS[device])):
        for value in values:
            if value not in accepted:
                raise ConfigError(f"{name}: must be one of {', '.join(accepted)}, got {value!r}")


def table(rows: Sequence[Row]) -> str:
    """Rows for a person to read; speeds also as a share of the first system's at the same batch size."""
    head = ["peer", "system", "shape", "device", "dtype", "batch", "beam", "sentences/s", "spread", "ratio"]
    first: dict[int, float] = {}  # in the first precision
    for row in rows:
        first.setdefault(row.batch, row.sentences_per_second)
    lines = [head]
    for row in rows:
        speed = row.sentences_per_second
        labels = [row.peer, row.system, row.shape, row.device, row.dtype, str(row.batch), str(row.beam)]
        lines.append([*labels, f"{speed:,.2f}", f"{row.spread:.0%}", f"{speed / first[row.batch]:.2f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = 5  # columns that are words; the rest are numbers
    return "\n".join(
        "  ".join(x.ljust(w) if i < texts else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def _at_once(batch: int, device: str) -> int:
    """Sentences of one measurement: on a CPU every core may have a batch of its own, whoever decodes."""
    if device != "cpu":
        return batch
    rounds = -(-FEWEST // (batch * torch.get_num_threads()))
    return batch * torch.get_num_threads() * rounds


def _sources(count: int) -> list[list[int]]:
    """Random sentences; lengths spread evenly, the same ones every time."""
    generator = torch.Generator().manual_seed(count)
    lengths = [SHORTEST + int((LONGEST - SHORTEST + 1) * (i + 0.5) / count) for i in range(count)]
    return [torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def _timed(contender: Contender, sources: Sequence[list[int]], batch: int) -> float:
    """Seconds for all sources."""
    began = time.perf_counter()
    lengths = contender.decode(sources, batch)  # outputs are lists of the CPU: by then a GPU has finished
    seconds = time.perf_counter() - began
    if list(lengths) != [TOKENS_OUT] * len(sources):
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


def random_model(system: str, shape: str) -> Seq2Seq:
    """Random weights, the same for the same shape."""
    torch.manual_seed(1)
    config = resolve(parse({"system": system, "data": "random", "model": {"preset": shape}}))
    return build(config, VOCABULARY, VOCABULARY).eval()


def random_transformer(shape: str) -> Transformer:
    """What peers do the same work as."""
    model = random_model(OURS[0], shape)
    assert isinstance(model, Transformer)
    return model


def _ours(system: str, work: Work) -> Contender:
    names = ("transformer-l2r", "transformer-r2l") if system == "rerank" else (system,)
    models = [random_model(name, work.shape).in_precision(work.precision).to(work.device) for name in names]
    directions = DIRECTIONS["both" if system == "rerank" else SYSTEMS[system].direction]
    for model in models:
        for one in (model, model.first) if isinstance(model, TwoPass) else (model,):
            if system == "rerank":
                _ends_at(one, work.tokens_out)
            else:
                never_ends(one)
    decoder = Panel(models, [(d,) for d in directions]) if system == "rerank" else models[0]
    # A sentence of 29 tokens takes 30 steps: what the last one chooses stands where an end mark would have to.
    settings = SearchConfig(beam=work.beam, greedy=work.beam == 1, max_length=work.tokens_out - 1)

    def decoded(sources: Sequence[list[int]], batch: int) -> list[int]:
        config = settings.model_copy(update={"batch_sentences": batch})
        found = [one.hypotheses[0] for _, one in decode(decoder, sources, directions, config, work.device)]
        return [len(hypothesis.tokens) + 1 for hypothesis in found]

    return Contender("bothways", system, work.precision, decoder.parameter_count(), decoded)


def never_ends(model: Seq2Seq) -> None:
    """The end mark becomes impossible."""
    _change_what_follows(model, lambda following, _: replace(following, first=END + 1))


def _ends_at(model: Seq2Seq, step: int) -> None:
    """Every hypothesis ends at this step, and none before it: rescoring asks for complete ones."""

    def ending(following: Distribution, state: State) -> Distribution:
        is_end = torch.arange(following.logits.size(-1), device=following.logits.device) == END
        following.logits.masked_fill_(is_end == (state.clock.step < step), -torch.inf)
        return following

    _change_what_follows(model, ending)


def _change_what_follows(model: Seq2Seq, change: Callable[[Distribution, State], Distribution]) -> None:
    """What every step says of the next token, and the state after it -> what is said instead."""
    go_on = model.step

    def step(
        tokens: Tensor, state: State, partners: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Distribution, State]:
        following, state = go_on(tokens, state, partners, weights)
        return change(following, state), state

    model.step = step  # type: ignore[method-assign]
