"""Peak memory and speed of preparing made-up text: `python tests/measure_prepare.py --pairs 2000000`.

The words follow Zipf's law, about twenty a side, so lengths, vocabulary and repetition are like those of real text.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bothways.data.prepare import prepare

SYLLABLES = "ka to mi re su no la be ti or en sch ung er ver pla ni sto gra da lu fe".split()


def write_text(path: Path, pairs: int, types: int, seed: int) -> None:
    """One side: `types` different words, the k-th of them with a frequency of about 1/k."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 6, size=types)
    words = ["".join(random.choice(SYLLABLES, size=n)) for n in lengths]
    share = np.cumsum(1 / np.arange(1, types + 1))
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for start in range(0, pairs, 10_000):
            n = random.poisson(19, size=min(10_000, pairs - start)) + 1
            picked = iter(np.searchsorted(share, random.random(int(n.sum())) * share[-1]).tolist())
            file.writelines(" ".join(words[next(picked)] for _ in range(k)) + " .\n" for k in n.tolist())


def main() -> None:
    """Make the text in another process, whose memory does not count, and prepare it in this one."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=2_000_000)
    options.add_argument("--types", type=int, default=40_000)
    options.add_argument("--vocab", type=int, default=8_000)
    options.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.write:
        for seed, side in enumerate(("source", "target")):
            write_text(chosen.write / side, chosen.pairs, chosen.types, seed)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--write", name], check=True)
        size = sum(path.stat().st_size for path in folder.iterdir())
        began, stages = time.perf_counter(), dict[str, float]()

        def progress(stage: str, done: int, total: int) -> None:
            stages[stage] = time.perf_counter() - began

        data = prepare(
            folder / "source", folder / "target", output=folder / "data", vocab=chosen.vocab, progress=progress
        )
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        tokens = int(data.train.source.lengths.sum()) + int(data.train.target.lengths.sum())
        print(f"{len(data.train):,} pairs, {size / 2**20:,.0f} MiB of text, {tokens:,} tokens")
        print(f"{seconds:.0f} s, {2 * len(data.train) / seconds:,.0f} lines per second (both sides counted)")
        print(f"peak memory {peak:.2f} GiB, of which the page cache of mapped files is a part")
        for stage, end in stages.items():
            print(f"  {stage}: done after {end:.0f} s")


if __name__ == "__main__":
    main()
