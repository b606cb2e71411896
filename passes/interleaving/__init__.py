"""What `interleave` makes of an exchange, and in which order the statements of two microbatches come."""
