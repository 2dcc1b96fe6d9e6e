"""Import path of the checkpoint consolidation."""

from deepspeed.checkpoint.weights.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict as convert_zero_checkpoint_to_state_dict,
    get_checkpoint_files as get_checkpoint_files,
    get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file as get_model_state_file,
    get_model_state_files as get_model_state_files,
    get_optim_files as get_optim_files,
    load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
    main as main,
)
