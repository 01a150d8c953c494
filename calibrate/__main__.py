"""`python -m calibrate`."""

from calibrate.cli import main

main()
