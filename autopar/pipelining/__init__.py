"""Pipeline schedules as plain data: actions, the orders of known schedules, their simulation and their trace."""
