"""The passes of the compiler: each file that `autopar/pipeline.py` lists holds one function from a Program to a new
Program.

A file's docstring says what it requires and ensures, and shows before → after; between passes the program is verified.
A folder here serves one pass; what two need is in `ir` or `cost`. `autopar/passes` is a link to this folder: it lies on
top to be found, and is imported by one name.

**Needed whole once, read whole by all** (`passes/annotate.py`). Operators that could read a value as terms may not
where another reader needs the sum anyway: the sum is taken once, and saved.

**Buckets are text.** `overlap` decides which tensors travel together; the program says so (`p.bucket("all_gather dp",
{…})`), so that what is sent, and in which order, can be read, counted before the run, and compared between ranks. The
runtime starts a bucket without waiting; `wait()` gives the tensors.

**Small sums travel together** (`joint_sums.py`): sums over one axis that are due at one place are one message; latency
counts there, not bytes.

**Two halves of a backward** (`passes/halves.py`). The input half is what the gradients of a region's inputs are made
of, the weight half the rest. What crosses is kept in the last form to which the input half moved it, so the halves
together send what the whole sends; what is gathered for both then lies gathered until the weight half has run. Views
are made again. The weight half hardly ever reads parameters.

**Fused where it is spelled out** (`fuse_elementwise.py`): RMSNorm, rotary embeddings and GELU's tanh form become one
operator on every device. Without kernels it is a few calls of torch, which hold less memory than what the model spells
out; it is left alone where a compiler makes more of what is spelled out (`Hardware.compiled`). On CUDA it is done where
the hardware has kernels that are predicted to gain. Nowhere does it cost a sharding that the strategy needs.

**Values have the model's names** (`name_values.py`, right behind `differentiate`): decisions are kept by them, and
equal regions get equal ones.
"""
