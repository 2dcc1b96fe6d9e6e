"""One turn of an ``aio_handle`` of the ``deepspeed`` interface; ``io.py`` starts it under this project's interpreter
and the reference's.

python aio_handle.py FILE write|read SECONDS        prints GB/s of whole passes over 256 MiB
"""

import sys
import time

import torch

from deepspeed.ops.op_builder import AsyncIOBuilder

BYTES = 256 << 20


def main() -> None:
    """Blocks of 1 MiB, 32 under way, one thread, the handle's own buffer; one pass that is not counted."""
    path, kind, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    settings = (1 << 20, 32, False, True, 1)  # block, queue, single_submit, overlap_events, intra_op_parallelism
    handle = AsyncIOBuilder().load().aio_handle(*settings)
    buffer = handle.new_cpu_locked_tensor(BYTES, torch.empty(0, dtype=torch.uint8)).fill_(3)
    move = handle.sync_pwrite if kind == "write" else handle.sync_pread
    move(buffer, path)
    passes, begin = 0, time.monotonic()
    while time.monotonic() - begin < seconds:
        move(buffer, path)
        passes += 1
    sys.stdout.write(f"RESULT {passes * BYTES / (time.monotonic() - begin) / 1e9}\n")


if __name__ == "__main__":
    main()
