"""What runs a generated program under torchrun: loading, parameters, steps, checks."""
