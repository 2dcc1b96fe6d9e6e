"""What the launcher costs: wall time of a job that does nothing, started by ``deepspeed`` and by torchrun.

The two alternate, so that a machine that slows down slows both. Prints one line per round and the medians. The ranks
are ``python -c pass`` (the launchers alone), or with --torch scripts that import torch and meet for one barrier.

    python benchmarks/launcher.py [--rounds 7] [--ranks 2] [--torch]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BARRIER = """\
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def seconds(command: list[str]) -> float:
    """Wall time of ``command``. Raises CalledProcessError when it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    subprocess.run(
        command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120
    )
    return time.perf_counter() - started


def main() -> None:
    """Alternate the two launchers and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--torch", action="store_true", help="ranks that import torch and pass one barrier")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.py"
        script.write_text(BARRIER if options.torch else "pass\n")
        launchers = {
            "deepspeed": [
                "-m",
                "deepspeed.launcher.runner",
                "--num_gpus",
                str(options.ranks),
                "--no_local_rank",
                str(script),
            ],
            "torchrun": [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(options.ranks),
                str(script),
            ],
        }
        taken: dict[str, list[float]] = {name: [] for name in launchers}
        for number in range(options.rounds + 1):
            for name, arguments in launchers.items():
                elapsed = seconds([sys.executable, *arguments])
                if number:  # the first round fills the page cache
                    taken[name].append(elapsed)
            if number:
                print(f"round {number}: " + ", ".join(f"{name} {times[-1]:.2f} s" for name, times in taken.items()))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    print(f"median of {options.rounds}: " + ", ".join(f"{name} {value:.2f} s" for name, value in medians.items()))
    print(f"deepspeed over torchrun: {medians['deepspeed'] - medians['torchrun']:+.2f} s")


if __name__ == "__main__":
    main()
