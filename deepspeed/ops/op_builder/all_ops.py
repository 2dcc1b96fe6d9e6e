"""Import path of the table of all kernel builders."""

from deepspeed.native.builders import ALL_OPS
