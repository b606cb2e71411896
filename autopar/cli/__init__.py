"""The command line: `autopar plan`, `verify`, `search`, `report` and the others.

`main.py` has the commands and exit codes (0 well, 1 the answer is no, 2 bad usage), `views.py` those that show a saved
plan, `input.py` reads what is typed, `options.py` what several share, `output.py` and `hardware_output.py` print, for
people and as JSON. `demo.py` trains a small Llama on four local processes (`demo_worker.py`) and proves it. `models/`
finds models by name.

**Nothing is loaded before it is needed**: imports stand inside functions here, so that `autopar --help` does not wait
for torch.
"""
