"""`autopar doctor`: is this machine, or are all ranks of a `torchrun`, fit for a run; what is off, and what helps.

`facts.py` asks a rank about itself, `judging.py` says what of that is off (pure), `folder.py` tries a shared folder,
`links.py` times messages and compares clocks, `ranks.py` brings answers of all ranks together within a bounded time,
`run.py` puts these together. Nothing here waits for ever: a rank that does not answer is named with what it was at.
"""

from autopar.api.doctor.findings import Finding
from autopar.api.doctor.run import Options, Report, doctor

__all__ = ["Finding", "Options", "Report", "doctor"]
