"""`python -m extproc`."""

from extproc.cli import main

main()
