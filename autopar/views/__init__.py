"""What people look at: tables, pictures, reports, traces, all made from one plan, saved or not.

`graphs.py` turns the lowered program into plain data (`planner/plan/drawn.py`) once: operators with their predicted
cost, collectives, buckets, calls; `step.py` and `step_memory.py` the step's spans and memory. Everything else reads
that data alone, so that a loaded plan draws: `text.py` (`print(plan)`), `picture.py` with `overview.py`, `modules.py`,
`operators.py`, `boxes.py`, `lanes.py`, `dot.py`, `render.py` (Graphviz), `charts.py`, `holds.py` (who holds what),
`compare.py`, `whatif.py`, `words.py`, `items.py`, `rows.py`, `hidden.py`, `other_axes.py`; `report.py` is one offline
page: `content.py` its content, one JSON object, `page.py` with `assets/` its HTML, CSS and JavaScript. `explain/` asks
why. Where an explanation or another memory limit needs solving, the model is traced again.

**Views read data, never the program**: what is drawn is what is saved, and the page that cannot move and the one that
can are made of the same object. No picture needs Graphviz installed: its WebAssembly build draws where there is none.
"""
