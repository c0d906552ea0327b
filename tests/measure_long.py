"""Long sentences and memory that runs out: `python tests/measure_long.py`. Not run by pytest.

Decodes a random source of 1,000 tokens into 1,000 with a random BIFT, on the GPU if there is one, and says how long it
took and how much memory beside the weights; then, on a GPU, a batch with less and less memory: it must be halved, and
must find what it found with all of it. Exits with 1 where a sentence was not decoded.
"""

import argparse
import sys
import time

import torch

from bothways import translator
from bothways.bench import never_ends, random_model
from bothways.config import SearchConfig
from bothways.tokens import DIRECTIONS, SPECIAL_TOKENS

VOCABULARY = 32_000
BATCH, LENGTH, OUT = 256, 300, 60
GIB = (4.0, 2.0, 1.0, 0.5, 0.25)  # beside the weights


def decoded(model: torch.nn.Module, sources: list[list[int]], out: int, device: torch.device) -> list[list[int]]:
    """The best hypotheses, of `out` tokens each."""
    config = SearchConfig(beam=4, max_length=out, batch_sentences=len(sources))
    found = dict(translator.decode(model, sources, DIRECTIONS["both"], config, device))  # type: ignore[arg-type]
    return [found[i].hypotheses[0].tokens for i in range(len(sources))]


def measure(precision: str, shape: str, length: int, device: torch.device) -> None:
    """One long sentence, twice: on a GPU the first time records."""
    model = random_model("bift", shape).in_precision(precision).to(device)
    never_ends(model)
    sources = [torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (length,)).tolist()]
    for turn in ("first", "second"):
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        (tokens,) = decoded(model, sources, length, device)
        seconds = time.perf_counter() - began
        held = f", {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB more" if before else ""
        print(f"{precision}, the {turn} time: {len(tokens):,} tokens out in {seconds:.2f} s{held}", flush=True)


def with_little(shape: str, device: torch.device) -> bool:
    """A batch with all memory, and with less and less; whether all sentences were decoded each time."""
    model = random_model("bift", shape).in_precision("float32").to(device)
    never_ends(model)
    sources = [torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (LENGTH,)).tolist() for _ in range(BATCH)]
    sizes: list[int] = []
    search = translator.search_each

    def noted(panel, sources, places, *rest):  # type: ignore[no-untyped-def]
        sizes.append(len(places))
        return search(panel, sources, places, *rest)

    translator.search_each = noted
    whole, fine = decoded(model, sources, OUT, device), True
    for gib in GIB:
        model.forget_recorded()
        sizes.clear()
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_allocated() + gib * 2**30
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
        found = decoded(model, sources, OUT, device)
        same = sum(one == other for one, other in zip(found, whole, strict=True))
        fine = fine and all(found)
        print(f"{gib} GiB: batches of {sizes}; {same} of {BATCH} sentences as with all memory", flush=True)
    return fine


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="base")
    parser.add_argument("--length", type=int, default=1000)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    for precision in ("float32", "bfloat16"):
        measure(precision, options.shape, options.length, device)
    if device.type == "cuda":
        sys.exit(not with_little(options.shape, device))


if __name__ == "__main__":
    main()
