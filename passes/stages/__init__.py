"""A program cut into the stages of a pipeline."""
