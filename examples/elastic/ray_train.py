"""The same training on Ray: ``python examples/elastic/ray_train.py --folder /shared/ckpt --workers 4``.

Ray starts all workers again when one is lost; they go on from the newest checkpoint in the folder. It runs them in
threads, where Python hears no signals, so only the checkpoints of ``every`` count.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def work(options: dict[str, Any]) -> None:
    """What each worker runs; Ray has made the process group."""
    from train import train

    train(options["folder"], options["updates"])


def main() -> None:
    """Start the job on a Ray cluster, or on this machine."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="shared by all workers")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    given.folder = str(Path(given.folder).absolute())  # workers run in folders of their own
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": given.folder, "updates": given.updates},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=not given.cpu),
        run_config=RunConfig(name="elastic", storage_path=given.folder, failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
