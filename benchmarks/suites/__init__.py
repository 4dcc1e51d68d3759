"""What is measured. Each module has `run(settings) -> Findings`."""
