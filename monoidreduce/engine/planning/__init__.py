"""Which schedule runs, by which tiles, and what it costs: the choice, its prediction, its trial."""
