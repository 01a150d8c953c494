"""The simulation: ranks, streams and collectives as SimPy processes on an integer clock."""
