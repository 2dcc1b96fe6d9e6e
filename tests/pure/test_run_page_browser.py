"""The page of a run in a browser, where one is installed: it opens from disk without a network and without an error,
and in wide and narrow windows nothing is cut off and no label lies on another.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from deepspeed.monitor.runfile import RunFile
from deepspeed.tools.report.cli import main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.skipif(BROWSER is None, reason="no browser is installed"), pytest.mark.timeout(300)]
# Leaves in the page's body what is wrong with where things are.
LOOK = """<script>
const bad = [], root = document.documentElement
if (root.scrollWidth > window.innerWidth) bad.push(`wider than the window: ${root.scrollWidth}`)
for (const figure of document.querySelectorAll("svg")) {
  const frame = figure.getBoundingClientRect()
  const texts = [...figure.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()])
  texts.forEach(([word, box], i) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
        box.bottom > frame.bottom + 1)
      bad.push(`cut off: ${word}`)
    for (const [other, its] of texts.slice(0, i))
      if (Math.min(box.right, its.right) - Math.max(box.left, its.left) > 1 &&
          Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top) > 2) bad.push(`${word} lies on ${other}`)
  })
}
for (const row of document.querySelectorAll("tr"))
  if (row.getBoundingClientRect().height > 400) bad.push(`a row of one letter a line: ${row.textContent}`)
document.body.setAttribute("data-bad", JSON.stringify(bad))
document.body.setAttribute("data-figures", document.querySelectorAll("svg").length)
document.body.setAttribute("data-width", window.innerWidth)
</script>"""


def long_run(folder: Path) -> Path:
    """A run with figures and names of many sizes; the folder of its page."""
    facts = {"model": "AVeryLongNameOfAModelThatSomebodyWroteWithoutASingleBlank" * 2, "batch": [4096, 8, 2]}
    facts |= {"parameters": 70_000_000_000, "units": 82, "ranks": 256, "plan": {"host": 7 << 40, "device": 3 << 30}}
    file = RunFile(folder, facts)
    for n in range(120_000, 121_000, 5):
        times = {"total_ms": 12_345.6 + n % 7, "forward_ms": 4000.0, "backward_ms": 8000.0, "step_ms": 340.0}
        times |= {"other_ms": 5.6 + n % 7, "wait_ms": 2.0, "communication_ms": 0.000123, "prefetch_hits": 9.0}
        last = {"step": n, "loss": 2.0 + 1e-4 / (n - 119_999), "grad_norm": 0.3 + n % 3, "grad_norm_clipped": 0.3}
        last |= {"lr": 1.5e-5 + (n - 120_000) * 1e-8, "loss_scale": 2.0 ** (16 + n % 3)}
        file.step(
            times | {"prefetch_misses": 1.0},
            last
            | {"memory": {"host": 7 << 40, "device_peak": 3 << 30}, "metrics": {"Train/Samples/tokens_per_s": 1e7 + n}},
        )
    ranks = [
        {"rank": r, "step": 5, "work": [1234.5 + r, 23456.7], "wait": [0.0123, 123.0], "host": "h"} for r in range(256)
    ]
    file.write("ranks", ranks=ranks, slow={"1": 2.0})
    file.write("slow", rank=1, times=2.0, text="rank 1 (a-host-with-a-very-long-name.of.some.cluster.example) is slow")
    file.write("warning", level="WARNING", text="/a/path/without/blanks" * 12, where="a_file_of_the_users.py:3")
    path = "/shared/" + "checkpoints-of-a-long-experiment/" * 6 + "global_step120500"
    file.write("checkpoint", step=120_500, seconds=12.5, until_named_s=99.5, bytes=1 << 40, path=path)
    file.close()
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = long_run(tmp_path_factory.mktemp("run"))
    assert main(["run", str(folder)]) == 0
    return (folder / "report.html").read_text()


@pytest.mark.parametrize("width", [1400, 800, 500])
def test_the_page_opens_without_a_network_and_everything_has_its_place(text: str, width: int, tmp_path: Path) -> None:
    assert len(text.encode()) < 3_000_000
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", f"{LOOK}</body>"))
    alone = ["unshare", "--net"] if subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0 else []
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    flags += ["--disable-background-networking", "--enable-logging=stderr", f"--window-size={width},900"]
    command = [*alone, str(BROWSER), *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', done.stdout.partition("<body")[2].partition(">")[0]))
    assert int(found["figures"]) == text.count("<svg") and int(found["figures"]) > 8
    assert abs(int(found["width"]) - width) < 40, "the window that was asked for"
    assert json.loads(unescape(found["bad"])) == []
