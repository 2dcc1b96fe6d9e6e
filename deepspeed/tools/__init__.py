"""The commands beside ``deepspeed``: they import the runtime, and nothing of the runtime imports them."""
