"""What is told about a configuration: errors with their line, rules, final values, and what each key does."""
