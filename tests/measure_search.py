"""How often the fast search finds what the naive one finds: `python tests/measure_search.py`. Not run by pytest.

A random model of each system decodes random sentences, greedily and with a beam: fast in float32, batched, from caches;
naively in float64, one sentence at a time, without a cache. Where the two differ, the naive search's closest decision
is printed: a difference counts as explained where it is below 1e-4. Exits with 1 where one is not.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from math import inf

import torch
from toy import Naive, naive_run, norm, settings, toy_model, toy_sources

from bothways.config import SearchConfig
from bothways.models.interface import Lattice, Seq2Seq
from bothways.search.exhaustive import lattice
from bothways.search.hypothesis import Found, Hypothesis, TraceStep
from bothways.tokens import DIRECTIONS, END, PAD
from bothways.translator import decode

MARGIN = 1e-4
SHAPE = {"encoder_layers": 2, "decoder_layers": 2, "width": 32, "heads": 4, "feed_forward": 64}


def greedy_run(model: Seq2Seq, source: torch.Tensor, limit: int, config: SearchConfig) -> Naive:
    """The rule of greedy search, with a model that replays everything at every step."""
    directions = DIRECTIONS[config.direction or "both"]
    both = len(directions) == 2
    partners, weights = ([[[0]]] * 2, [[[1.0]]] * 2) if both else ([[[]]], [[[]]])
    tokens, ended = [d.tag for d in directions], [False] * len(directions)
    paths: list[tuple[list[int], list[float]]] = [([], []) for _ in directions]
    steps: list[TraceStep] = []
    gaps: list[float] = []
    for _ in range(limit + 1):
        zeros = [[0]] * len(directions)
        steps.append(TraceStep([[t] for t in tokens], zeros, [[0.0]] * len(directions), [], partners, weights))
        rows = model.replay(model.encode(source[None]), Lattice(*lattice(steps)))[:, -1]
        for d, row in enumerate(rows):
            if ended[d] or (len(paths[d][0]) == limit and int(row.argmax()) != END):
                continue
            best, second = row.topk(2).values.tolist()
            gaps.append(best - second)
            paths[d][1].append(best)
            ended[d] = int(row.argmax()) == END
            tokens[d] = PAD if ended[d] else int(row.argmax())
            if not ended[d]:
                paths[d][0].append(tokens[d])
        if all(ended):
            break
    found = [
        Hypothesis(path, scores, sum(scores) / norm(len(scores), config), direction, not end)
        for (path, scores), direction, end in zip(paths, directions, ended, strict=True)
    ]
    ranked = sorted(found, key=lambda h: (h.cut_off, -h.score))
    if both and ranked[0].cut_off == ranked[1].cut_off:
        gaps.append(ranked[0].score - ranked[1].score)
    return Naive(Found(ranked[:1], {h.direction: h for h in found}), min(gaps, default=inf))


def beam_run(model: Seq2Seq, source: torch.Tensor, limit: int, config: SearchConfig) -> Naive:
    """The naive search of the tests, and how close its closest decision was."""
    return naive_run(model, source, limit, config)


def measure(system: str, config: SearchConfig, count: int, device: torch.device, run: Callable[..., Naive]) -> int:
    """Decode both ways; returns how many differences no near-tie explains."""
    model = toy_model(system, seed=1, vocabulary=200, **SHAPE)
    precise = toy_model(system, seed=1, vocabulary=200, **SHAPE).double()
    sources = toy_sources(1, count, vocabulary=200, longest=12)
    began = time.perf_counter()
    texts: Sequence[list[int]] = [source[:-1].tolist() for source in sources]
    fast = dict(decode(model.to(device), texts, DIRECTIONS[config.direction or "both"], config, device))
    fast_seconds = time.perf_counter() - began
    near, wrong = [], []
    with torch.inference_mode():
        for i, source in enumerate(sources):
            assert config.max_length is not None
            naive = run(precise, source, config.max_length, config)
            ours, theirs = ([(h.direction, h.tokens) for h in f.hypotheses] for f in (fast[i], naive.found))
            if ours != theirs:
                (near if naive.closest < MARGIN else wrong).append((i, naive.closest))
    print(
        f"{system}, {'greedy' if config.greedy else f'beam {config.beam}'}: {count:,} sentences, "
        f"{count - len(near) - len(wrong):,} equal, {len(near)} differ by a near-tie "
        f"({', '.join(f'{gap:.1e}' for _, gap in near) or 'none'}), {len(wrong)} otherwise {wrong or ''} "
        f"(fast {fast_seconds:.1f} s, naive {time.perf_counter() - began - fast_seconds:.0f} s)",
        flush=True,
    )
    return len(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)  # the naive search is of tiny products: more threads would wait for each other
    wrong = 0
    for system, direction in (("transformer-l2r", "l2r"), ("bift", "both")):
        for greedy in (True, False):
            config = settings(direction=direction, beam=4, greedy=greedy, max_length=10, nbest=1)
            run = greedy_run if greedy else beam_run
            wrong += measure(system, config, options.sentences, torch.device(options.device), run)
    sys.exit(bool(wrong))
