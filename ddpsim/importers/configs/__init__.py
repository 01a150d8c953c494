"""Configs of other programs: what of them is a scenario's, by one table a program."""
