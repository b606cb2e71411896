"""`autopar calibrate`: measure this machine, fit the curves of a hardware profile, write it as TOML.

`timing` times a function, `cases` lists what is timed, `collectives` times groups of ranks, `fit` turns times into
curves and `profile` makes a profile of them (both pure), `profile_text` writes it, `run` puts these together.
"""

from autopar.cost.calibration.run import Calibration, Options, calibrate

__all__ = ["Calibration", "Options", "calibrate"]
