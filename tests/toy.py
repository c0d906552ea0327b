"""What the tests of models and search share: tiny random models, a model as a table, and the naive search over either.

A toy's weights are enlarged, so that its distributions are peaked and each direction's words change the other's.
Tests name families, not classes: a family added to `FAMILIES` runs through all of them.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, inf, log
from typing import Any

import torch
from torch import Tensor, nn

from bothways.config import SearchConfig, parse
from bothways.models.interface import Lattice, Seq2Seq
from bothways.models.table import build, resolve
from bothways.search.beam import Plan, search
from bothways.search.exhaustive import lattice, naive
from bothways.search.hypothesis import Found, Hypothesis, TraceStep, length_norm
from bothways.search.recorded import Recorder
from bothways.stepwise import Distribution
from bothways.tokens import DIRECTIONS, END, PAD, UNKNOWN, Direction

CLOSE = 1e-5  # what SPEC section 3 allows scores to differ by, and candidates to be apart in a near-tie
PER_TOKEN = 3  # times as much for one token's log-probability, which no length divides (1.3e-5 was seen in 4,500 runs)


# -- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """The systems of one model class, and a shape that decodes in milliseconds."""

    both: str  # the directions read each other
    apart: str  # both directions, which do not
    l2r: str
    r2l: str
    shape: dict[str, Any]
    meetings: tuple[dict[str, Any], ...]  # options: every way in which the directions can meet
    shapes: tuple[dict[str, Any], ...]  # options: other forms of the same model
    asynchronous: str = ""  # r2l speaks first, and l2r reads its states; empty: there is none

    def lag(self, meeting: dict[str, Any]) -> int:
        """How many of its partner's newest tokens a position does not read: one in BI-RNMT's printed range."""
        return int(self.both == "bi-rnmt" and meeting.get("future_span", "printed") == "printed")


FAMILIES = {
    "transformer": Family(
        both="bift",
        apart="no-interaction",
        l2r="transformer-l2r",
        r2l="transformer-r2l",
        shape={
            **{"encoder_layers": 1, "decoder_layers": 2, "width": 8, "heads": 2, "feed_forward": 16},
            "future_weight": 1.0,
        },
        meetings=(
            {"fusion": "tanh"},
            {"fusion": "linear", "future_weight": 0.7},
            {"fusion": "gate"},
            {"fusion": "tanh", "future_weight_learned": True},
        ),
        shapes=(
            {"norm": "post", "share_embeddings": "all"},
            {"norm": "pre", "share_embeddings": "target"},
            {"norm": "post", "share_embeddings": "none", "decoder_layers": 1},
        ),
        asynchronous="abd-transformer",
    ),
    "rnn": Family(
        both="bi-rnmt",
        apart="rnmt-no-interaction",
        l2r="rnmt-l2r",
        r2l="rnmt-r2l",
        shape={"encoder_layers": 2, "decoder_layers": 2, "width": 8},
        meetings=({"future_span": "printed"}, {"future_span": "current"}),
        shapes=(
            {"share_embeddings": "all"},
            {"share_embeddings": "target", "encoder_layers": 1, "decoder_layers": 1},
            {"share_embeddings": "none", "encoder_layers": 3},
        ),
        asynchronous="abd-rnmt",
    ),
}


def family_of(system: str) -> Family:
    """The family that a system belongs to."""
    return next(f for f in FAMILIES.values() if system in (f.both, f.apart, f.l2r, f.r2l, f.asynchronous))


def toy_model(system: str = "bift", seed: int = 0, vocabulary: int = 9, **options: Any) -> Seq2Seq:
    """A random small model whose distributions are peaked and whose futures matter (λ about 1)."""
    settings = {**family_of(system).shape, **options}
    torch.manual_seed(seed)
    model = build(resolve(parse({"system": system, "data": "nowhere", "model": settings})), vocabulary, vocabulary)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0 if id(parameter) in embeddings else 1.2)
            else:  # biases, norms and λ
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


def same_weights(model: Seq2Seq, system: str, **options: Any) -> Seq2Seq:
    """Another system with this model's weights; parameters that it does not have are left out."""
    other = toy_model(system, vocabulary=model.output_weight.size(0), **options)
    own, names = model.state_dict(), set(other.state_dict())
    assert names <= set(own), f"{system} has weights of its own: {sorted(names - set(own))}"
    other.load_state_dict({name: own[name] for name in names})
    return other


def toy_sources(seed: int = 0, count: int = 4, vocabulary: int = 9, longest: int = 6) -> list[Tensor]:
    """Random sentences of 1 to `longest` tokens and the end mark."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(count)]
    return [torch.tensor([*(rng.randrange(UNKNOWN, vocabulary) for _ in range(n)), END]) for n in lengths]


def pad(sentences: Sequence[Tensor], extra: int = 0) -> Tensor:
    """[B, S] with padding on the right, `extra` columns more than needed."""
    width = max(len(sentence) for sentence in sentences) + extra
    return torch.stack([torch.cat([x, x.new_full((width - len(x),), PAD)]) for x in sentences])


def streams(seed: int, lengths: Sequence[Sequence[int]], vocabulary: int = 9) -> Tensor:
    """Inputs [R, D, T] of streams with these numbers of tokens: tag, tokens, padding."""
    rng = random.Random(f"streams {seed}")
    width = 1 + max(n for row in lengths for n in row)
    rows = [
        [
            [d.tag, *(rng.randrange(UNKNOWN, vocabulary) for _ in range(n)), *[PAD] * (width - 1 - n)]
            for d, n in zip(Direction, row, strict=False)
        ]
        for row in lengths
    ]
    return torch.tensor(rows)


# -- search over models ----------------------------------------------------------------------------------------------


def settings(**options: Any) -> SearchConfig:
    """Search settings, both directions unless said otherwise."""
    return SearchConfig(**{"direction": "both", **options})


def decode(
    model: Seq2Seq,
    sources: Sequence[Tensor],
    limits: int | Sequence[int],
    config: SearchConfig,
    forced: Tensor | None = None,
    padding: int = 0,
    recorder: Recorder | None = None,
) -> list[Found]:
    """The fast search over a batch of sentences, with its trace unless its steps are recorded."""
    directions = DIRECTIONS[config.direction or "both"]
    limits = torch.tensor([limits] * len(sources) if isinstance(limits, int) else limits)
    with torch.inference_mode():
        state = model.start(model.encode(pad(sources, padding)), len(directions), Plan.of(config, directions).slots)
        trace = recorder is None
        return search(model.step, state, limits, directions, config, forced, trace, recorder=recorder)


@dataclass(frozen=True)
class Naive:
    """What the naive search found, and how close its closest decision was."""

    found: Found
    closest: float


def naive_run(model: Seq2Seq, source: Tensor, limit: int, config: SearchConfig) -> Naive:
    """The naive search with a float64 copy of the model: no cache, no batch, no padding."""
    precise = copy.deepcopy(model).double()

    def distributions(steps: Sequence[TraceStep]) -> list[list[list[float]]]:
        with torch.inference_mode():
            rows = precise.replay(precise.encode(source[None]), Lattice(*lattice(steps)))
        return rows[:, -len(steps[-1].tokens[0]) :].tolist()  # type: ignore[no-any-return]

    return naive_over(distributions, limit, config)


def naive_found(model: Seq2Seq, source: Tensor, limit: int, config: SearchConfig) -> Found:
    """What the naive search finds."""
    return naive_run(model, source, limit, config).found


def naive_over(
    distributions: Callable[[Sequence[TraceStep]], list[list[list[float]]]], limit: int, config: SearchConfig
) -> Naive:
    """The naive search over any distributions."""
    rows: list[list[list[list[float]]]] = []

    def recorded(steps: Sequence[TraceStep]) -> list[list[list[float]]]:
        rows.append(distributions(steps))
        return rows[-1]

    found = naive(recorded, limit, DIRECTIONS[config.direction or "both"], config)
    return Naive(found, min(_gaps(found, rows, limit, config), default=inf))


def _gaps(found: Found, rows: list[list[list[list[float]]]], limit: int, config: SearchConfig) -> Iterator[float]:
    """How far apart the candidates of every decision of a search were."""
    assert found.trace is not None
    complete: list[float] = []
    ends = found.trace.ends
    scores = path_scores(found.trace.steps)
    for t, step_rows in enumerate(rows):
        K = len(scores[t][0])
        for half, slots in zip(scores[t], step_rows, strict=True):
            totals = sorted(
                (s + x for s, row in zip(half, slots, strict=True) for x in row if s + x > -inf), reverse=True
            )
            yield from (a - b for a, b in pairwise(totals[: 2 * K + 1]))
        complete += [
            (scores[t][_row(found, end.direction)][end.slot] + end.log_prob) / norm(t + 1, config)
            for end in ends
            if end.step == t
        ]
        complete.sort(reverse=True)
        if len(complete) >= config.nbest and config.early_stop:
            reachable = max(s for half in scores[t + 1] for s in half) / norm(limit + 1, config)
            yield abs(reachable - complete[config.nbest - 1])
    yield from (a - b for a, b in pairwise(complete[: config.beam + 1]))


def _row(found: Found, direction: Direction) -> int:
    """The index of a direction in a trace, which may have only one."""
    assert found.trace is not None
    return int(direction) if len(found.trace.steps[0].tokens) == 2 else 0


def norm(tokens: int, config: SearchConfig) -> float:
    """What a log-probability of so many tokens is divided by."""
    return float(length_norm(tokens, config.length_penalty))


def path_scores(steps: Sequence[TraceStep]) -> list[list[list[float]]]:
    """[step][direction][slot]: the log-probability of what each slot has produced; -∞ where it is dead."""
    scores = [[[0.0 if live else -inf for live in half] for half in steps[0].live]]
    for step in steps[1:]:
        scores.append(
            [
                [
                    before[parent] + log_prob if live else -inf
                    for parent, log_prob, live in zip(parents, log_probs, alive, strict=True)
                ]
                for before, parents, log_probs, alive in zip(
                    scores[-1], step.parents, step.log_probs, step.live, strict=True
                )
            ]
        )
    return scores


def path(steps: Sequence[TraceStep], t: int, d: int, slot: int) -> list[int]:
    """The tokens of the hypothesis that stands in a slot after `t` of them."""
    tokens = []
    while t:
        tokens.append(steps[t].tokens[d][slot])
        slot = steps[t].parents[d][slot]
        t -= 1
    return tokens[::-1]


# -- comparing results -----------------------------------------------------------------------------------------------


@dataclass
class Ties:
    """How many results were compared, and how many differed where the deciding candidates were a near-tie."""

    compared: int = 0
    allowed: list[float] = field(default_factory=list)


TIES = Ties()  # reported at the end of the tests


def apart(a: float, b: float, tolerance: float) -> bool:
    """Whether two numbers differ; infinities are equal to themselves."""
    return a != b and not abs(a - b) <= tolerance


def hypothesis_difference(a: Hypothesis, b: Hypothesis, tolerance: float = CLOSE) -> str:
    """What differs between two hypotheses; empty if nothing does."""
    if (a.tokens, a.direction, a.cut_off) != (b.tokens, b.direction, b.cut_off):
        return f"{a} is not {b}"
    if apart(a.score, b.score, tolerance) or len(a.token_scores) != len(b.token_scores):
        return f"{a} is not {b}"
    if any(apart(x, y, PER_TOKEN * tolerance) for x, y in zip(a.token_scores, b.token_scores, strict=True)):
        return f"token scores {a.token_scores} are not {b.token_scores}"
    return ""


def difference(a: Found, b: Found, tolerance: float = CLOSE) -> str:
    """What differs between two results; empty if nothing does."""
    if len(a.hypotheses) != len(b.hypotheses) or set(a.best) != set(b.best):
        return f"{a} is not {b}"
    pairs = [*zip(a.hypotheses, b.hypotheses, strict=True), *((a.best[d], b.best[d]) for d in a.best)]
    return next((said for x, y in pairs if (said := hypothesis_difference(x, y, tolerance))), "")


def trace_difference(fast: Found, slow: Found, config: SearchConfig, tolerance: float = CLOSE) -> str:
    """What differs between the traces of the fast and the naive search, up to what dead slots hold."""
    assert fast.trace is not None and slow.trace is not None
    if len(fast.trace.steps) != len(slow.trace.steps):
        return f"{len(fast.trace.steps)} steps are not {len(slow.trace.steps)}"
    for t, (a, b) in enumerate(zip(fast.trace.steps, slow.trace.steps, strict=True)):
        if a.live != b.live:
            return f"step {t}: live {a.live} is not {b.live}"
        for d, half in enumerate(a.live):
            for k in [k for k, live in enumerate(half) if live]:
                if (a.tokens[d][k], a.parents[d][k]) != (b.tokens[d][k], b.parents[d][k]):
                    return f"step {t}, direction {d}, slot {k}: {a} is not {b}"
                if apart(a.log_probs[d][k], b.log_probs[d][k], PER_TOKEN * tolerance):
                    return f"step {t}, direction {d}, slot {k}: {a.log_probs[d][k]} is not {b.log_probs[d][k]}"
                if a.partners[d][k] != b.partners[d][k]:
                    return f"step {t}, direction {d}, slot {k}: reads {a.partners[d][k]}, not {b.partners[d][k]}"
                if any(apart(x, y, tolerance) for x, y in zip(a.weights[d][k], b.weights[d][k], strict=True)):
                    return f"step {t}, direction {d}, slot {k}: weights {a.weights[d][k]} are not {b.weights[d][k]}"
    # both list the ends best first; the fast search drops those that its direction has `beam` better ones for
    ends = [
        end
        for i, end in enumerate(slow.trace.ends)
        if sum(other.direction == end.direction for other in slow.trace.ends[:i]) < config.beam
    ]
    if [(e.step, e.direction, e.slot) for e in fast.trace.ends] != [(e.step, e.direction, e.slot) for e in ends]:
        return f"ends {fast.trace.ends} are not {ends}"
    if any(apart(x.log_prob, y.log_prob, PER_TOKEN * tolerance) for x, y in zip(fast.trace.ends, ends, strict=True)):
        return f"ends {fast.trace.ends} are not {ends}"
    return ""


def assert_same(said: str, run: Callable[[], Naive]) -> None:
    """No difference, or one that a near-tie explains: deciding candidates of this sentence are closer than 1e-5."""
    TIES.compared += 1
    if said:
        closest = run().closest
        assert closest < CLOSE, f"{said}; the closest decision is no near-tie but {closest} apart"
        TIES.allowed.append(closest)


# -- a model as a table ----------------------------------------------------------------------------------------------

# sentence, direction, own tokens so far, (tokens of a partner, its weight)... -> probability of each next token
Futures = tuple[tuple[tuple[int, ...], float], ...]
Table = Callable[[int, Direction, tuple[int, ...], Futures], dict[int, float]]


@dataclass(frozen=True)
class Paths:
    """The state of a scripted model: what every hypothesis has consumed, tag included, as plain tuples."""

    sentences: list[int]
    paths: list[list[list[tuple[int, ...]]]]

    def select(self, origins: Tensor) -> "Paths":
        rows = zip(self.paths, origins.tolist(), strict=True)
        return Paths(self.sentences, [[[h[k] for k in o] for h, o in zip(p, s, strict=True)] for p, s in rows])

    def keep(self, sentences: Tensor) -> "Paths":
        rows = sentences.tolist()
        return Paths([self.sentences[row] for row in rows], [self.paths[row] for row in rows])


class Script:
    """A step function that reads its probabilities from a table: what search does, without a model."""

    def __init__(self, table: Table, directions: str = "both", vocabulary: int = 9) -> None:
        self.table, self.directions, self.vocabulary = table, DIRECTIONS[directions], vocabulary

    def start(self, sentences: int, hypotheses: int) -> Paths:
        empty: list[list[tuple[int, ...]]] = [[()] * hypotheses for _ in self.directions]
        return Paths(list(range(sentences)), [empty] * sentences)

    def step(
        self, tokens: Tensor, state: Paths, partners: Tensor | None, weights: Tensor | None
    ) -> tuple[Distribution, Paths]:
        paths = [
            [
                [(*p, token) if token != PAD else p for p, token in zip(half, chosen, strict=True)]
                for half, chosen in zip(row, halves, strict=True)
            ]
            for row, halves in zip(state.paths, tokens.tolist(), strict=True)
        ]
        out = torch.full((*tokens.shape, self.vocabulary), -torch.inf, dtype=torch.float64)
        for b, d, k in torch.cartesian_prod(*(torch.arange(n) for n in tokens.shape)).tolist():
            futures: Futures = ()
            if partners is not None and weights is not None:
                pairs = zip(partners[b, d, k].tolist(), weights[b, d, k].tolist(), strict=True)
                futures = tuple((paths[b][1 - d][slot][1:], weight) for slot, weight in pairs if weight > 0)
            chances = self.table(state.sentences[b], self.directions[d], paths[b][d][k][1:], futures)
            for token, chance in chances.items():
                out[b, d, k, token] = log(chance) if chance else -inf
        return Distribution(out, is_normalized=True), Paths(state.sentences, paths)

    def distributions(self, sentence: int) -> Callable[[Sequence[TraceStep]], list[list[list[float]]]]:
        """The same table, as the naive search asks for it."""

        def rows(steps: Sequence[TraceStep]) -> list[list[list[float]]]:
            t, last = len(steps) - 1, steps[-1]
            out = []
            for d, direction in enumerate(self.directions):
                half = []
                for k, (slots, shares) in enumerate(zip(last.partners[d], last.weights[d], strict=True)):
                    futures = tuple(
                        (consumed(steps, t, 1 - d, slot), weight)
                        for slot, weight in zip(slots, shares, strict=True)
                        if weight > 0
                    )
                    chances = self.table(sentence, direction, consumed(steps, t, d, k), futures)
                    half.append([log(c) if (c := chances.get(v, 0.0)) else -inf for v in range(self.vocabulary)])
                out.append(half)
            return out

        return rows

    def found(
        self, limits: int | Sequence[int], forced: Tensor | None = None, sentences: int = 1, **options: Any
    ) -> list[Found]:
        """The fast search over the first sentences of the table."""
        config = settings(**{"direction": "both" if len(self.directions) == 2 else self.directions[0].label, **options})
        limits = torch.tensor([limits] * sentences if isinstance(limits, int) else limits)
        state = self.start(len(limits), Plan.of(config, self.directions).slots)
        return search(self.step, state, limits, self.directions, config, forced, trace=True)  # type: ignore[arg-type]


def consumed(steps: Sequence[TraceStep], t: int, d: int, slot: int) -> tuple[int, ...]:
    """What a slot has consumed after its tag; padding was none."""
    return tuple(token for token in path(steps, t, d, slot) if token != PAD)


def random_table(seed: int, vocabulary: int = 9, gaps: float = 0.0) -> Table:
    """Each distribution is drawn from its history; `gaps` is the share of tokens that are impossible after it."""

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        rng = random.Random(repr((seed, sentence, direction, own)))
        logits = {token: rng.gauss(0, 1.5) for token in range(END, vocabulary) if rng.random() >= gaps} or {END: 0.0}
        for future, weight in futures:  # smooth in the weights, as a model is
            shift = random.Random(repr((seed, sentence, direction, own, future)))
            logits = {token: logit + weight * shift.gauss(0, 1.5) for token, logit in logits.items()}
        total = sum(exp(logit) for logit in logits.values())
        return {token: exp(logit) / total for token, logit in logits.items()}

    return table
