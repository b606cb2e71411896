"""The passes of the compiler: each file holds one function from a Program to a new Program."""
