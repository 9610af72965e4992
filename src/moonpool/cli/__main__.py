"""`python -m moonpool.cli`, for where the console script is not on the path."""

from moonpool.cli import main

main()
