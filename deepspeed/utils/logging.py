from deepspeed.monitor.log import log_dist, log_dist_once, logger, print_dist, set_log_level_from_string, warning_once
