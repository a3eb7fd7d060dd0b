"""`make report-image`: draws the top of a run's report in Chromium for the README, light and dark."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SCHEMES = {"report.png": 1, "report-dark.png": 0}  # Chromium's numbers of the preferred colour scheme
SIZE = "1180,1620"  # pixels: header, curves and the first answer
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def draw(report: Path) -> None:
    """Writes both images; ends with a sentence if there is no report, or no Chromium."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if not browser:
        sys.exit("error: Chromium is not installed; run: apt-get install chromium")
    if not report.is_file():
        sys.exit(f"error: {report} does not exist; run `make train`, or name another run: RUN=name")
    for name, scheme in SCHEMES.items():
        with tempfile.TemporaryDirectory() as profile:
            flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
            look = (f"--window-size={SIZE}", f"--blink-settings=preferredColorScheme={scheme}")
            place = (f"--user-data-dir={profile}", f"--screenshot={IMAGES / name}")
            argv = [browser, *flags, *look, *place, report.resolve().as_uri()]
            subprocess.run(argv, check=True, capture_output=True, timeout=60)
        print(f"wrote {(IMAGES / name).relative_to(IMAGES.parents[1])}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) / "report.html")
