"""Names of the checkpoint consolidation interface; checkpoints are not part of this release."""

from deepspeed.pending import pending_function

_MODULE = "deepspeed.utils.zero_to_fp32"
_INSTEAD = "Until then gather weights with deepspeed.zero.GatheredParameters and torch.save."

get_fp32_state_dict_from_zero_checkpoint = pending_function(f"{_MODULE}.get_fp32_state_dict_from_zero_checkpoint", _INSTEAD)
convert_zero_checkpoint_to_fp32_state_dict = pending_function(f"{_MODULE}.convert_zero_checkpoint_to_fp32_state_dict", _INSTEAD)
convert_zero_checkpoint_to_state_dict = pending_function(f"{_MODULE}.convert_zero_checkpoint_to_state_dict", _INSTEAD)
load_state_dict_from_zero_checkpoint = pending_function(f"{_MODULE}.load_state_dict_from_zero_checkpoint", _INSTEAD)
get_model_state_file = pending_function(f"{_MODULE}.get_model_state_file", _INSTEAD)
get_optim_files = pending_function(f"{_MODULE}.get_optim_files", _INSTEAD)
