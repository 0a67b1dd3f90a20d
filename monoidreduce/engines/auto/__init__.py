"""The engine ``auto``: runs every fold by the schedule that the cost model or a tuned plan chose."""
