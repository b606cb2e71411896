"""What outline reads off the model beside its graph: the names that its source gives to values (`wanted_names`): the
variable that a statement assigns, the module that returns a value. `passes/name_values.py` makes them unique and
legal later, behind `differentiate`.
"""
