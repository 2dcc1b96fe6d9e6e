"""Where model states live when they are not on the device: host memory and files, and how they move."""
