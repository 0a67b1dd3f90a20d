"""The engine ``auto``: runs every fold by the schedule that the planner chose, or that a tuner measured to be best."""
