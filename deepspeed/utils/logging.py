"""Import path of the logger."""

from deepspeed.observe.log import log_dist, logger
from deepspeed.observe.log_tools import log_dist_once, print_dist, set_log_level_from_string, warning_once
