"""``deepspeed.dist`` is ``deepspeed.comm`` under a second name: whoever imports this module gets that one."""

import sys

from deepspeed import comm

sys.modules[__name__] = comm
