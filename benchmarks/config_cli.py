"""What ``ds_config check`` costs beyond starting the interpreter: medians of runs that alternate with an empty
program.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[1] / "examples" / "configs" / "hf_auto.json"


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11, help="pairs of runs")
    parser.add_argument("--file", default=str(SAMPLE), help="configuration to check")
    args = parser.parse_args()
    empty = [sys.executable, "-c", "pass"]
    check = [sys.executable, "-m", "deepspeed.tools.config.cli", "check", args.file]
    seconds(empty), seconds(check)  # the first run reads the files from the disk
    pairs = [(seconds(empty), seconds(check)) for _ in range(args.runs)]
    base, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
    extra = statistics.median(b - a for a, b in pairs)
    print(f"python -c pass   {base * 1000:7.1f} ms")
    print(f"ds_config check  {whole * 1000:7.1f} ms")
    print(f"difference       {extra * 1000:7.1f} ms (median of {args.runs} pairs)")


if __name__ == "__main__":
    main()
