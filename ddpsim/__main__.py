"""`python -m ddpsim`."""

from ddpsim.cli import main

main()
