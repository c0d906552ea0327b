"""A report's page -> pictures of it in headless Chromium: at a desk and on a phone, light and dark.

    bothways demo
    python tools/screenshots.py demo/report.html --output docs/images

Without --chromium the first of chromium, chromium-browser and google-chrome that is installed takes them. Nothing
reaches the network: the page needs nothing, and the browser is told to ask for nothing itself.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# name: width, height, and how many device pixels make one of the page's
SHAPES = {"desktop": (1100, 1650, 1.0), "phone": (390, 1400, 1.0)}
WHOLE = 9_000  # pixels: higher than any report, for a look at all of it
MODES = {"dark": 0, "light": 1}  # Chromium's own numbers for the colour scheme a person prefers
CALM = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-background-networking "
    "--disable-component-update --disable-sync --disable-default-apps --disable-extensions --no-first-run "
    "--disable-quic --metrics-recording-only --proxy-server=127.0.0.1:9 --run-all-compositor-stages-before-draw"
).split()


def picture(chromium: str, page: Path, output: Path, size: tuple[int, int, float], mode: str) -> None:
    """One picture; a phone's page is shown in a frame of its width, since a window cannot be that narrow."""
    width, height, scale = size
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            chromium,
            *CALM,
            f"--user-data-dir={scratch}/profile",
            f"--blink-settings=preferredColorScheme={MODES[mode]}",
            f"--window-size={width},{height}",
            f"--force-device-scale-factor={scale}",
            f"--screenshot={scratch}/shot.png",
            page.resolve().as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        shot = Path(scratch) / "shot.png"
        if not shot.exists():
            sys.exit(f"{chromium} took no picture:\n{done.stderr[-2_000:]}")
        shutil.copyfile(shot, output)


def main() -> None:
    """Four pictures, or with --whole four of the whole page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, help="the report's HTML file")
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="folder for the pictures")
    parser.add_argument("--chromium", help="the browser's program")
    parser.add_argument("--whole", action="store_true", help="the whole page, not its first screens")
    given = parser.parse_args()
    known = ("chromium", "chromium-browser", "google-chrome")
    chromium = given.chromium or next((path for name in known if (path := shutil.which(name))), None)
    if chromium is None:
        sys.exit(f"found none of {', '.join(known)}; name the browser: --chromium PATH")
    if not given.page.is_file():
        sys.exit(f"{given.page}: no such file; `bothways demo` or `bothways report --output` makes one")
    given.output.mkdir(parents=True, exist_ok=True)
    for shape, (width, height, scale) in SHAPES.items():
        for mode in MODES:
            target = given.output / f"report-{shape}-{mode}.png"
            picture(chromium, given.page, target, (width, WHOLE if given.whole else height, scale), mode)
            print(f"{target}: {target.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
