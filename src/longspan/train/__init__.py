"""Training: a config, the step, checkpoints and the loop."""
