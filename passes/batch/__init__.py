"""How the values of a program depend on the rows of its batch."""
