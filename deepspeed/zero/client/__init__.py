"""What users and clients call: gathering, reading and editing, building sharded, lending memory."""
