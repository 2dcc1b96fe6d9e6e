"""Import path of activation checkpointing; nothing is defined here."""

from deepspeed.runtime.activation_checkpointing import checkpointing
