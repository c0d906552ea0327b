"""How long the tests of significance take: `python tests/measure_significance.py`. Not run by pytest."""

import random
import time

import numpy as np

from bothways.evaluate import scores, significance

WORDS = [f"w{i}" for i in range(5_000)]


def text(lines: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for _ in range(lines)]


def corrupted(lines: list[str], seed: int, share: float) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) if draw.random() < share else word for word in line.split()) for line in lines]


def measure(systems: int, lines: int, metrics: list[str]) -> None:
    references = text(lines, 0)
    texts = {f"system {i}": corrupted(references, i, 0.3 + 0.01 * i) for i in range(systems)}
    for name in metrics:
        began = time.perf_counter()
        (measured,) = scores.measure(texts, [references], [name])
        counted = time.perf_counter()
        statistics = np.stack(list(measured.rows.values()))
        significance.bootstrap(measured.metric, statistics)
        bootstrapped = time.perf_counter()
        significance.compare(measured)
        compared = time.perf_counter()
        print(
            f"{systems:2} systems, {lines:6,} segments, {name}: statistics {counted - began:5.2f} s, "
            f"1,000 bootstrap resamples {bootstrapped - counted:5.2f} s, both tests {compared - bootstrapped:5.2f} s"
        )


if __name__ == "__main__":
    measure(2, 2_000, ["bleu", "chrf", "ter", "rouge1"])
    measure(10, 10_000, ["bleu"])
