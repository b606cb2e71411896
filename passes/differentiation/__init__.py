"""What `differentiate` notes while autograd runs (`backward_notes`): of each node of the backward, the operator of the
forward that it belongs to, and the value whose gradient it is.

**Autograd is asked, nothing is matched**: each of its nodes says which gradients it gets and what it records, so
modules, source lines and names of the backward are known, not guessed from shapes or order.
"""
