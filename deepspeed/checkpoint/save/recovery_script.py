"""The small program that lies beside the checkpoints and gets plain weights out of them."""

_TEXT = '''\
#!/usr/bin/env python3
"""Write the weights of a checkpoint in this folder as one fp32 state dict that plain PyTorch loads.

    python zero_to_fp32.py . out                          the newest checkpoint -> out/pytorch_model.bin
    python zero_to_fp32.py . out --tag global_step100 --safe_serialization --max_shard_size 2GB

Needs no process group and no accelerator, and holds one output shard in memory. See also: ds_checkpoint export --help
"""

import sys

from deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    sys.exit(main())
'''


def script_text() -> str:
    """The text of ``zero_to_fp32.py``; whoever writes it makes it executable."""
    return _TEXT
